//! The two trained demo models against what transformers gave in float32, and their loss when packed.
//!
//! `models/assets/README.md` says where the models come from; `models/assets/train/export_golden.py` what
//! `golden.json` holds.

use std::collections::BTreeMap;
use std::path::PathBuf;

use horizon_core::backend::Activations;
use horizon_core::dense::DenseFormat;
use horizon_models::demo::{decompress, restore_weights};
use horizon_models::source::{ExpertsMode, ModelSource};
use horizon_models::tokenizer::Tokenizer;
use horizon_runtime::eval::Perplexity;
use serde_json::Value;

use crate::arm::{Arm, Running, Which};
use crate::files::{Tolerances, difference, ids, json};

pub const MODELS: [&str; 2] = ["stories-olmoe", "stories-qwen2moe"];

/// A greedy step whose two best logits are closer than this may go the other way in FP16 arithmetic.
const NEAR_TIE: f64 = 0.02;

fn assets() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/assets")
}

fn read(path: &str) -> Vec<u8> {
    std::fs::read(assets().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn unpacked(path: &str) -> Vec<u8> {
    decompress(&read(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The tokenizer that both models share.
fn tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(&unpacked("stories-olmoe/tokenizer.json.zst")).expect("a tokenizer")
}

pub fn source(model: &str) -> ModelSource {
    let files = BTreeMap::from([("config.json".to_owned(), read(&format!("{model}/config.json")))]);
    let weights = restore_weights(&read(&format!("{model}/weights.planes.zst"))).expect("sound assets");
    ModelSource::in_memory(model, files, weights).unwrap_or_else(|e| panic!("{model}: {e}"))
}

pub fn golden(model: &str) -> Value {
    json(&assets().join(model).join("golden.json"))
}

fn running(model: &str, activations: Activations, experts: ExpertsMode) -> Running {
    running_as(model, activations, experts, DenseFormat::F16)
}

fn running_as(model: &str, activations: Activations, experts: ExpertsMode, dense: DenseFormat) -> Running {
    Arm {
        backend: Which::Fast,
        activations,
        experts,
        dense,
    }
    .open(&source(model))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a Vec<Value> {
    value[key]
        .as_array()
        .unwrap_or_else(|| panic!("{key} is not a list"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("not a number: {value}"))
}

#[test]
fn prompts_and_answers_have_the_recorded_ids_and_text() {
    let tokenizer = tokenizer();
    for model in MODELS {
        let golden = golden(model);
        let prompts = list(&golden, "prompts");
        assert_eq!(prompts.len(), 8);
        for prompt in prompts {
            let text = prompt["text"].as_str().expect("a text");
            assert_eq!(
                tokenizer.encode(text, true).expect("encodes"),
                ids(&prompt["ids"]),
                "{text:?}"
            );
            let answer = tokenizer
                .decode(&ids(&prompt["greedy_ids"]), false)
                .expect("decodes");
            assert_eq!(
                answer,
                prompt["greedy_text"].as_str().expect("a text"),
                "{text:?}"
            );
        }
    }
}

#[test]
fn greedy_text_is_that_of_transformers() {
    for model in MODELS {
        let golden = golden(model);
        for activations in [Activations::F32, Activations::F16] {
            let mut running = running(model, activations, ExpertsMode::F16);
            for prompt in list(&golden, "prompts") {
                let want = ids(&prompt["greedy_ids"]);
                assert_eq!(want.len(), 64);
                let steps = match activations {
                    Activations::F32 => want.len(),
                    Activations::F16 => list(prompt, "margins")
                        .iter()
                        .take_while(|m| number(m) >= NEAR_TIE)
                        .count(),
                };
                let got = running.greedy(&ids(&prompt["ids"]), want.len());
                assert_eq!(
                    got[..steps],
                    want[..steps],
                    "{model} {activations:?} {}",
                    prompt["text"]
                );
            }
        }
    }
}

#[test]
fn the_ten_largest_logits_are_the_recorded_ones() {
    for model in MODELS {
        let golden = golden(model);
        for (activations, arithmetic) in [(Activations::F32, "f32"), (Activations::F16, "fp16")] {
            let tolerance = Tolerances::of(arithmetic).for_tensor("logits");
            let mut running = running(model, activations, ExpertsMode::F16);
            for prompt in list(&golden, "prompts") {
                let at = format!("{model} {arithmetic} {}", prompt["text"]);
                let logits = running
                    .sequence(&ids(&prompt["ids"]))
                    .real
                    .remove("logits")
                    .expect("logits");
                let last = &logits[logits.len() - logits.len() / list(prompt, "ids").len()..];
                let top: Vec<(usize, f32)> = serde_json::from_value(prompt["top10"].clone()).expect("pairs");
                let want: Vec<f32> = top.iter().map(|(_, v)| *v).collect();
                let got: Vec<f32> = top.iter().map(|(id, _)| last[*id]).collect();
                assert_eq!(difference(&got, &want, tolerance), None, "{at}");
                let rms = (want.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 10.0).sqrt();
                let limit = f64::from(want[9]) + tolerance.max_over_rms * rms;
                for (id, logit) in last.iter().enumerate() {
                    let listed = top.iter().any(|(t, _)| *t == id);
                    assert!(
                        listed || f64::from(*logit) <= limit,
                        "{at}: token {id} has logit {logit}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_first_tokens_take_the_recorded_experts() {
    let tolerance = Tolerances::of("f32").for_tensor("topk_weight");
    for model in MODELS {
        let routing = golden(model)["routing"].clone();
        let got = running(model, Activations::F32, ExpertsMode::F16).sequence(&ids(&routing["ids"]));
        let layers = list(&routing, "layers");
        assert_eq!(layers.len(), got.integer.len(), "{model}");
        for (layer, want) in layers.iter().enumerate() {
            let experts: Vec<Vec<i32>> = serde_json::from_value(want["experts"].clone()).expect("rows");
            let weights: Vec<Vec<f32>> = serde_json::from_value(want["weights"].clone()).expect("rows");
            assert_eq!(experts.len(), 16);
            assert_eq!(
                got.integer[&format!("topk_index.{layer}")],
                experts.concat(),
                "{model} layer {layer}"
            );
            let weight = &got.real[&format!("topk_weight.{layer}")];
            assert_eq!(
                difference(weight, &weights.concat(), tolerance),
                None,
                "{model} layer {layer}"
            );
        }
    }
}

/// Loss on the first 32 KiB of the held-out text, in windows of 512 tokens.
fn loss(model: &str, activations: Activations, experts: ExpertsMode) -> Perplexity {
    loss_as(model, activations, experts, DenseFormat::F16)
}

fn loss_as(model: &str, activations: Activations, experts: ExpertsMode, dense: DenseFormat) -> Perplexity {
    let golden = golden(model);
    let bytes = usize::try_from(golden["val"]["bytes"].as_u64().expect("a number")).expect("small");
    let text = String::from_utf8(unpacked("train/val.txt.zst")).expect("the text is UTF-8");
    let tokens = tokenizer().encode(&text[..bytes], true).expect("encodes");
    let window = usize::try_from(golden["val"]["nll_window"].as_u64().expect("a number")).expect("small");
    let mut running = running_as(model, activations, experts, dense);
    let result = running
        .evaluator()
        .perplexity(&tokens, window, &mut |_| {})
        .expect("runs");
    assert_eq!(
        Some(result.tokens as u64),
        golden["val"]["tokens"].as_u64(),
        "{model}"
    );
    assert_eq!(
        Some(result.predicted as u64),
        golden["val"]["predicted"].as_u64(),
        "{model}"
    );
    result
}

#[test]
fn the_loss_is_that_of_transformers() {
    for model in MODELS {
        let want = number(&golden(model)["val"]["nll_float32"]);
        let got = loss(model, Activations::F32, ExpertsMode::F16).nll;
        assert!((got - want).abs() < 1e-4, "{model}: {got}, not {want}");
    }
}

#[test]
fn packing_costs_less_than_one_percent_of_the_loss() {
    for model in MODELS {
        let plain = loss(model, Activations::F16, ExpertsMode::F16).nll;
        let packed = loss(model, Activations::F16, ExpertsMode::default()).nll;
        println!(
            "{model}: {plain:.6} unquantized, {packed:.6} packed, {:+.2} %",
            100.0 * (packed / plain - 1.0)
        );
        assert!(
            packed / plain < 1.01,
            "{model}: {packed} packed, {plain} unquantized"
        );
        assert!(packed != plain, "{model}: packing changed nothing");
    }
}

/// docs/results/dense-loss.md has the figures: at most 0.04 % either way.
#[test]
fn q8_weights_cost_less_than_a_thousandth_of_the_loss() {
    for model in MODELS {
        for experts in [ExpertsMode::F16, ExpertsMode::default()] {
            let [plain, q8] = [DenseFormat::F16, DenseFormat::Q8]
                .map(|dense| loss_as(model, Activations::F16, experts, dense).nll);
            println!(
                "{model} {experts:?}: {plain:.6}, q8 {q8:.6}, {:+.3} %",
                100.0 * (q8 / plain - 1.0)
            );
            assert!(
                (q8 / plain - 1.0).abs() < 1e-3,
                "{model} {experts:?}: q8 {q8}, f16 {plain}"
            );
            assert!(q8 != plain, "{model}: q8 changed nothing");
        }
    }
}
