//! Every tiny model against Hugging Face transformers: each layer, the routing, the logits, decoding step by step.
//!
//! The files and the tolerances are described in `fixtures/goldens/README.md`.

use std::sync::atomic::AtomicBool;

use horizon_core::artifact::Silent;
use horizon_core::backend::Activations;
use horizon_core::dense::DenseFormat;
use horizon_core::qpacked::BlockSize;
use horizon_models::pack::{PackOptions, pack};
use horizon_models::source::{ExpertsMode, ModelSource};
use serde_json::Value;

use crate::arm::{Arm, Outcome, Running, Which, packed};
use crate::files::{Tensors, Tolerance, Tolerances, difference, fixtures, ids, json, write_checkpoint};

pub const MODELS: [&str; 8] = [
    "mixtral-tiny",
    "olmoe-micro",
    "olmoe-tiny-a",
    "olmoe-tiny-b",
    "qwen2moe-micro",
    "qwen2moe-tiny-a",
    "qwen2moe-tiny-b",
    "qwen3moe-tiny",
];

/// The forms of the experts that goldens exist for: name of the file, and the mode.
fn forms() -> [(&'static str, ExpertsMode); 3] {
    [
        ("goldens", ExpertsMode::F16),
        ("w4a16-b256", packed(BlockSize::B256)),
        ("w4a16-b32", packed(BlockSize::B32)),
    ]
}

/// A golden model's checkpoint in a temporary directory, opened.
pub fn source(model: &str, config: &str) -> (tempfile::TempDir, ModelSource) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    write_checkpoint(model, config, dir.path());
    let source = ModelSource::open(dir.path()).unwrap_or_else(|e| panic!("{model}: {e}"));
    (dir, source)
}

/// Collects what is wrong, so that one run names everything.
#[derive(Default)]
struct Report {
    checked: usize,
    wrong: Vec<String>,
}

impl Report {
    fn check(&mut self, what: impl FnOnce() -> String, problem: Option<String>) {
        self.checked += 1;
        if let Some(problem) = problem {
            self.wrong.push(format!("{}: {problem}", what()));
        }
    }

    /// Holds every golden tensor of one sequence against what the model gave.
    fn compare(&mut self, at: &str, name: &str, golden: &Tensors, got: &Outcome, tolerances: &Tolerances) {
        let prefix = format!("{name}.");
        let of_sequence = |n: &String| n.strip_prefix(&prefix).map(str::to_owned);
        for (tensor, want) in golden.real.iter().filter_map(|(n, w)| Some((of_sequence(n)?, w))) {
            let problem = match got.real.get(&tensor) {
                None => Some("there is no such stage".into()),
                Some(got) => difference(got, want, tolerances.for_tensor(&tensor)),
            };
            self.check(|| format!("{at} {name}.{tensor}"), problem);
        }
        for (tensor, want) in golden
            .integer
            .iter()
            .filter_map(|(n, w)| Some((of_sequence(n)?, w)))
        {
            let same = got.integer.get(&tensor) == Some(want);
            self.check(
                || format!("{at} {name}.{tensor}"),
                (!same).then(|| "other experts".into()),
            );
        }
    }

    #[track_caller]
    fn end(self) {
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        assert!(self.checked > 0, "nothing was compared");
    }
}

/// The golden tensors of one form of the experts, the routing that stands in the index itself among them.
fn golden(model: &str, file: &str, section: &Value) -> Tensors {
    let mut golden = Tensors::read(&fixtures().join(model).join(format!("{file}.safetensors.zst")));
    for (tensor, rows) in section["topk_index"].as_object().into_iter().flatten() {
        let rows: Vec<Vec<i32>> = serde_json::from_value(rows.clone()).expect("rows of experts");
        golden.integer.insert(tensor.clone(), rows.concat());
    }
    golden
}

/// Layers, routing and logits of every sequence, and the greedy tokens, in some arms of one form of the experts.
fn check_form(
    report: &mut Report,
    model: &str,
    file: &str,
    arms: impl Iterator<Item = Arm>,
    source: &ModelSource,
) {
    let index = json(&fixtures().join(model).join("index.json"));
    let section = match file.strip_prefix("w4a16-") {
        None => &index,
        Some(variant) => &index["w4a16"][variant],
    };
    let golden = golden(model, file, section);
    for arm in arms {
        let at = format!("{model} {file} {:?} {}", arm.backend, arm.arithmetic());
        let (tolerances, before) = (Tolerances::of(arm.arithmetic()), report.checked);
        let mut running = arm.open(source);
        for (name, tokens) in index["sequences"].as_object().expect("sequences by name") {
            let got = running.sequence(&ids(tokens));
            report.compare(&at, name, &golden, &got, &tolerances);
        }
        assert_eq!(
            report.checked - before,
            golden.real.len() + golden.integer.len(),
            "{at}: a tensor was left out"
        );
        let (prompt, want) = (
            ids(&section["greedy"]["prompt"]),
            ids(&section["greedy"]["tokens"]),
        );
        let got = running.greedy(&prompt, want.len());
        report.check(
            || format!("{at} greedy"),
            (got != want).then(|| format!("{got:?}, not {want:?}")),
        );
    }
}

/// Every golden of a model in one backend, from both styles of configuration.
fn check_model(model: &str, backend: Which) {
    let mut report = Report::default();
    let (_dir, from_v4) = source(model, "config.json");
    for (file, experts) in forms() {
        let arms = Arm::all(experts).filter(|a| a.backend == backend);
        check_form(&mut report, model, file, arms, &from_v4);
    }
    // The other style is the same model, and runs.
    let (_dir, from_v5) = source(model, "config_v5.json");
    assert_eq!(from_v4.spec(), from_v5.spec(), "{model}: the two configurations");
    let arm = Arm {
        backend,
        activations: Activations::F32,
        experts: ExpertsMode::F16,
        dense: DenseFormat::F16,
    };
    check_form(&mut report, model, "goldens", [arm].into_iter(), &from_v5);
    report.end();
}

macro_rules! each_model {
    ($($test:ident $model:literal)*) => {
        mod reference {
            $(#[test] fn $test() { super::check_model($model, super::Which::Reference); })*
        }

        mod fast {
            $(#[test] fn $test() { super::check_model($model, super::Which::Fast); })*
        }

        #[test]
        fn every_model_has_its_test() {
            assert_eq!([$($model),*], MODELS);
            let mut folders: Vec<String> = std::fs::read_dir(fixtures())
                .expect("the goldens are part of the project")
                .map(|e| e.expect("an entry"))
                .filter(|e| e.path().is_dir())
                .map(|e| e.file_name().into_string().expect("plain names"))
                .collect();
            folders.sort();
            assert_eq!(folders, MODELS);
        }
    };
}

each_model! {
    mixtral_tiny "mixtral-tiny"
    olmoe_micro "olmoe-micro"
    olmoe_tiny_a "olmoe-tiny-a"
    olmoe_tiny_b "olmoe-tiny-b"
    qwen2moe_micro "qwen2moe-micro"
    qwen2moe_tiny_a "qwen2moe-tiny-a"
    qwen2moe_tiny_b "qwen2moe-tiny-b"
    qwen3moe_tiny "qwen3moe-tiny"
}

/// Prefill of 20 and 20 single steps give the bits of the full pass: the goldens allow noise, the rules here do not.
#[test]
fn decoding_step_by_step_equals_the_full_pass() {
    for model in MODELS {
        let (_dir, source) = source(model, "config.json");
        let incremental = json(&fixtures().join(model).join("index.json"))["incremental"].clone();
        let sequence = incremental["sequence"].as_str().expect("a name");
        let tokens = ids(&json(&fixtures().join(model).join("index.json"))["sequences"][sequence]);
        let prefill = usize::try_from(incremental["prefill"].as_u64().expect("a number")).expect("small");
        assert!(prefill > 0 && prefill < tokens.len());
        for (_, experts) in &forms()[..2] {
            for arm in Arm::all(*experts) {
                let whole = arm.open(&source).sequence(&tokens);
                let vocab = whole.real["logits"].len() / tokens.len();
                let check = |running: &mut Running, from: usize, to: usize| {
                    let got = running.step(&tokens[from..to], from).logits;
                    let want = &whole.real["logits"][(to - 1) * vocab..to * vocab];
                    let same = got
                        .iter()
                        .map(|v| v.to_bits())
                        .eq(want.iter().map(|v| v.to_bits()));
                    assert!(same, "{model} {arm:?}: position {}", to - 1);
                };
                let mut running = arm.open(&source);
                check(&mut running, 0, prefill);
                for position in prefill..tokens.len() {
                    check(&mut running, position, position + 1);
                }
            }
        }
    }
}

/// A packed artifact gives the bits of the checkpoint packed in memory, in both backends.
#[test]
fn an_artifact_equals_its_checkpoint() {
    let out = tempfile::tempdir().expect("a temporary directory");
    for model in MODELS {
        let (_dir, checkpoint) = source(model, "config.json");
        let tokens = ids(&json(&fixtures().join(model).join("index.json"))["sequences"]["s40"]);
        for options in [
            PackOptions::default(),
            PackOptions {
                block: BlockSize::B32,
                quantizer: horizon_core::qpacked::Quantizer::Absmax,
                ..PackOptions::default()
            },
        ] {
            let place = out.path().join(format!("{model}-{}.hz", options.block));
            pack(&checkpoint, &place, &options, &Silent, &AtomicBool::new(false))
                .unwrap_or_else(|e| panic!("{model}: {e}"));
            let artifact = ModelSource::open(&place).unwrap_or_else(|e| panic!("{model}: {e}"));
            assert_eq!(artifact.spec(), checkpoint.spec(), "{model}");
            let experts = ExpertsMode::Qpacked {
                block: Some(options.block),
                quantizer: Some(options.quantizer),
            };
            for arm in Arm::all(experts).filter(|a| a.activations == Activations::F16) {
                let want = arm.open(&checkpoint).sequence(&tokens);
                let got = arm.open(&artifact).sequence(&tokens);
                assert!(
                    got.bits() == want.bits(),
                    "{model} {options:?} {arm:?}: the artifact gives other bits"
                );
            }
        }
    }
}

/// The two checkpoints that transformers itself wrote load as they are.
#[test]
fn checkpoints_saved_by_transformers_load_as_written() {
    let mut found = 0;
    for model in MODELS {
        let hub = fixtures().join(model).join("hub");
        if !hub.is_dir() {
            continue;
        }
        found += 1;
        let source = ModelSource::open(&hub).unwrap_or_else(|e| panic!("{model}: {e}"));
        let mut report = Report::default();
        for (file, experts) in forms() {
            check_form(&mut report, model, file, Arm::all(experts), &source);
        }
        report.end();
    }
    assert_eq!(found, 2);
}

/// The comparison itself refuses what it must.
#[test]
fn a_difference_is_seen() {
    let tolerance = Tolerance {
        rel_rms: 0.1,
        max_over_rms: 0.2,
    };
    let want = [1.0, -1.0, 1.0, -1.0];
    assert_eq!(difference(&[1.05, -1.0, 1.0, -0.95], &want, tolerance), None);
    for bad in [
        &[1.0, -1.0, 1.0][..],
        &[1.0, -1.0, 1.0, f32::NAN],
        &[1.0, -1.0, 1.0, f32::INFINITY],
        &[1.15, -1.15, 1.15, -1.15],
        &[1.21, -1.0, 1.0, -1.0],
    ] {
        assert!(difference(bad, &want, tolerance).is_some(), "{bad:?}");
    }
    assert!(difference(&[0.0], &[0.0], tolerance).is_some());
    assert!(difference(&[f32::NAN], &[f32::NAN], tolerance).is_some());
}
