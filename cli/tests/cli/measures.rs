//! `horizon eval`, `horizon bench`, `horizon man`, `horizon completions`.

use std::fs;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};

use super::{as_str, golden, horizon};

#[test]
fn logits_are_written_at_every_position_with_taps_by_stage_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("out.safetensors");
    let line = [
        "eval",
        "logits",
        "--tokens",
        "413, 421,263 386",
        "-o",
        as_str(&file),
        "--experts",
        "f16",
    ];
    let report = horizon(&[&line as &[&str], &["--activations", "f32", "--taps", "--json"]].concat())
        .ok()
        .json();
    assert_eq!(
        (report["positions"].as_u64(), report["vocab"].as_u64()),
        (Some(4), Some(4096))
    );
    assert_eq!(report["settings"]["activations"], "f32");
    let bytes = fs::read(&file).expect("was written");
    let tensors = SafeTensors::deserialize(&bytes).expect("is safetensors");
    let shape = |name: &str| {
        let t = tensors.tensor(name).expect(name);
        (t.dtype(), t.shape().to_vec())
    };
    assert_eq!(shape("logits"), (Dtype::F32, vec![4, 4096]));
    for layer in 0..5 {
        for (stage, dtype, width) in [
            ("hidden", Dtype::F32, 256),
            ("attn_out", Dtype::F32, 256),
            ("mlp_out", Dtype::F32, 256),
            ("router_logits", Dtype::F32, 16),
            ("topk_index", Dtype::I32, 4),
            ("topk_weight", Dtype::F32, 4),
        ] {
            assert_eq!(shape(&format!("{stage}.{layer}")), (dtype, vec![4, width]));
        }
    }
    assert_eq!(tensors.len(), 31);
}

#[test]
fn logits_are_those_of_transformers_and_taps_change_nothing() {
    let golden = golden();
    let prompt = &golden["prompts"][2];
    let ids: Vec<String> = prompt["ids"]
        .as_array()
        .expect("ids")
        .iter()
        .map(ToString::to_string)
        .collect();
    let folder = tempfile::tempdir().expect("a folder");
    let logits = |name: &str, more: &[&str]| {
        let file = folder.path().join(name);
        let tokens = ids.join(",");
        let line = [
            "eval",
            "logits",
            "--tokens",
            &tokens,
            "-o",
            as_str(&file),
            "--experts",
            "f16",
        ];
        horizon(&[&line as &[&str], more].concat()).ok();
        let bytes = fs::read(&file).expect("was written");
        let tensors = SafeTensors::deserialize(&bytes).expect("is safetensors");
        let data = tensors.tensor("logits").expect("has logits").data().to_vec();
        data.as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect::<Vec<f32>>()
    };
    let exact = logits("a", &["--activations", "f32"]);
    assert_eq!(logits("b", &["--activations", "f32", "--taps"]), exact);
    assert_eq!(
        logits("c", &["--activations", "f32", "--backend", "cpu-reference"]),
        exact
    );
    let last = &exact[(ids.len() - 1) * 4096..];
    for pair in prompt["top10"].as_array().expect("pairs") {
        let id = usize::try_from(pair[0].as_u64().expect("an id")).expect("small");
        let want = pair[1].as_f64().expect("a logit");
        assert!(
            (f64::from(last[id]) - want).abs() < 5e-4,
            "token {id}: {} against {want}",
            last[id]
        );
    }
}

#[test]
fn bad_token_sequences_are_refused_and_nothing_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("out.safetensors");
    let with = |tokens: &str, more: &[&str]| {
        horizon(&[&["eval", "logits", "--tokens", tokens, "-o", as_str(&file)], more].concat())
    };
    with("1,4096", &[]).fails(2, &["4096 is outside the vocabulary of 4096"]);
    with("1,2,3", &["--ctx", "2"]).fails(1, &["3 tokens do not fit the context of 2"]);
    with(&"1 ".repeat(1025), &[]).fails(1, &["1025", "1024"]);
    assert!(!file.exists());
    let nowhere = folder.path().join("no/out.safetensors");
    horizon(&["eval", "logits", "--tokens", "1", "-o", as_str(&nowhere)]).fails(1, &["no/out.safetensors"]);
}

#[test]
fn perplexity_is_that_of_transformers() {
    let golden = golden();
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/assets");
    let text = fs::read(assets.join("train/val.txt.zst")).expect("the asset is there");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("val.txt");
    fs::write(&file, horizon_models::demo::decompress(&text).expect("is zstd")).expect("writes");
    let line = [
        "eval",
        "perplexity",
        as_str(&file),
        "--bytes",
        "32768",
        "--experts",
        "f16",
    ];
    let v = horizon(&[&line as &[&str], &["--activations", "f32", "--json"]].concat())
        .ok()
        .json();
    assert_eq!(v["predicted"], golden["val"]["predicted"]);
    assert_eq!(v["tokens"], golden["val"]["tokens"]);
    let want = golden["val"]["nll_float32"].as_f64().expect("a number");
    let got = v["nll"].as_f64().expect("a number");
    assert!((got - want).abs() < 2e-5, "{got} against {want}");
    // What is not text, and what predicts nothing.
    fs::write(&file, "a").expect("writes");
    horizon(&["eval", "perplexity", as_str(&file)]).fails(1, &["needs two"]);
    fs::write(&file, [b'a', 0xff]).expect("writes");
    horizon(&["eval", "perplexity", as_str(&file)]).fails(1, &["UTF-8"]);
    horizon(&["eval", "perplexity", as_str(&file), "--window", "2000"]).fails(1, &["byte 1"]);
}

#[test]
fn a_benchmark_holds_its_figures_against_measured_bandwidth() {
    let v = horizon(&[
        "bench",
        "decode",
        "--tokens",
        "16",
        "--routing-load",
        "64",
        "--json",
    ])
    .ok()
    .json();
    let number = |key: &str| v[key].as_f64().unwrap_or_else(|| panic!("{key} in {v}"));
    let rate = number("decode_tokens_per_second");
    let bandwidth = v["memory_bandwidth"]["bytes_per_second"]
        .as_f64()
        .expect("a number");
    let bytes = v["bytes_per_token"]["total"].as_f64().expect("a number");
    assert!((number("fraction_of_bandwidth") - rate * bytes / bandwidth).abs() < 1e-9);
    assert_eq!(
        (v["generated_tokens"].as_u64(), v["prompt_tokens"].as_u64()),
        (Some(16), Some(32))
    );
    assert!(v["cold_start"]["first_token_s"].as_f64() > v["cold_start"]["load_s"].as_f64());
    assert_eq!(
        v["cold_start"]["read"],
        serde_json::json!([]),
        "there is no file to read"
    );
    assert_eq!(v["routing_load"]["layers"].as_array().map(Vec::len), Some(5));
    horizon(&["bench", "decode", "--tokens", "1000"]).fails(1, &["1032 tokens", "1024"]);
    let text = horizon(&["bench", "decode", "--tokens", "4"]).ok().stdout;
    assert!(
        text.contains("tok/s") && text.contains("GB/s") && text.contains("predicted"),
        "{text}"
    );
}

/// The floor is told when it is asked for, and is UNKNOWN otherwise.
#[test]
fn an_answer_is_held_against_measured_bandwidth_on_request() {
    let line = ["run", "Once upon", "-n", "8", "--greedy", "--json"];
    let v = horizon(&line).ok().json();
    assert_eq!(v["floor"], "UNKNOWN");
    let done = horizon(&[&line[..], &["--stats"]].concat()).ok();
    let v = done.json();
    let number = |path: &str| {
        v.pointer(path)
            .and_then(serde_json::Value::as_f64)
            .expect("a number")
    };
    let want = number("/timings/decode_tokens_per_second") * number("/floor/bytes_per_token/total")
        / number("/floor/memory_bandwidth/bytes_per_second");
    assert!(
        (number("/floor/fraction_of_bandwidth") - want).abs() < 1e-9,
        "{v}"
    );
    assert!(done.stderr.contains("of the byte floor"), "{}", done.stderr);
    // One token has no rate.
    let one = ["run", "Once upon", "-n", "1", "--greedy", "--json", "--stats"];
    assert_eq!(horizon(&one).ok().json()["floor"], "UNKNOWN");
}

/// With q8 weights the memory falls, is foretold, and the bytes a token are fewer.
#[test]
fn q8_weights_are_counted_as_they_are_held() {
    let inspect = |dense| horizon(&["inspect", "--json", "--dense", dense]).ok().json();
    let (f16, q8) = (inspect("f16"), inspect("q8"));
    let of = |v: &serde_json::Value, path: &str| {
        v.pointer(path)
            .and_then(serde_json::Value::as_u64)
            .expect("a number")
    };
    for path in [
        "/host_memory/weights/dense",
        "/bytes_per_token/head",
        "/gpu_memory/capacities/0/dense",
    ] {
        let ratio = of(&q8, path) as f64 / of(&f16, path) as f64;
        assert!((0.5..0.95).contains(&ratio), "{path}: {ratio}");
    }
    // The head: 8 bits a weight and a scale of 16 for 32 of them, in place of 16.
    assert_eq!(
        of(&q8, "/bytes_per_token/head") * 32,
        of(&f16, "/bytes_per_token/head") * 17
    );
    assert_eq!(
        (&q8["dense"], &q8["dtypes"]["non_routed_execution"]),
        (&"q8".into(), &"F16".into())
    );
    let v = horizon(&["bench", "decode", "--tokens", "4", "--dense", "q8", "--json"])
        .ok()
        .json();
    assert_eq!(v["settings"]["dense"], "q8");
    assert_eq!(
        v["predicted"]["weights"]["dense"],
        q8["host_memory"]["weights"]["dense"]
    );
    assert_eq!(v["bytes_per_token"]["head"], q8["bytes_per_token"]["head"]);
}

#[test]
fn manual_and_completions_know_every_command() {
    let page = horizon(&["man"]).ok().stdout;
    for name in ["run", "chat", "pack", "inspect", "eval", "bench"] {
        assert!(page.contains(name), "{name}");
    }
    assert!(
        horizon(&["man", "eval", "logits"])
            .ok()
            .stdout
            .contains("safetensors")
    );
    horizon(&["man", "nothing"]).fails(2, &["run, chat, pack"]);
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(
            horizon(&["completions", shell])
                .ok()
                .stdout
                .contains("make-checkpoint"),
            "{shell}"
        );
    }
    let help = horizon(&["--help"]).ok().stdout;
    assert!(help.contains("Exit codes") && help.contains("130"), "{help}");
}
