//! `horizon pack`, `horizon inspect`, and running what they are about.

use std::fs;

use super::{as_str, demo_checkpoint, horizon, run_json};

#[test]
fn a_checkpoint_is_packed_inspected_verified_and_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = demo_checkpoint(folder.path());
    let artifact = folder.path().join("stories.hz");
    let (src, dest) = (as_str(&dir), as_str(&artifact));
    let report = horizon(&["pack", src, "-o", dest, "--block", "64", "--json"])
        .ok()
        .json();
    assert_eq!(
        (report["block"].as_u64(), report["quantizer"].as_str()),
        (Some(64), Some("mse"))
    );

    // In memory or on disk, the packed model is the same.
    let line = ["Once upon a time", "-n", "20", "--seed", "4"];
    let from = |more: &[&str]| run_json(&[&line, more].concat());
    let packed = from(&["-m", dest]);
    assert_eq!(
        packed["token_ids"],
        from(&["-m", src, "--block", "64"])["token_ids"]
    );
    assert_eq!(packed["settings"]["model"]["kind"], "artifact");
    assert_eq!(packed["settings"]["model"]["sha256"], report["manifest_sha256"]);
    assert_eq!(packed["settings"]["experts"]["block"], 64);

    let v = horizon(&["inspect", dest, "--verify", "--ctx", "100", "--json"])
        .ok()
        .json();
    assert_eq!(v["verified"]["manifest_sha256"], report["manifest_sha256"]);
    assert_eq!(v["quantization_error"].as_array().map(Vec::len), Some(5));
    let rows = v["gpu_memory"]["capacities"].as_array().expect("rows");
    assert_eq!(
        (
            rows.len(),
            rows[0]["capacity"].as_u64(),
            rows[12]["capacity"].as_u64()
        ),
        (13, Some(4), Some(16))
    );
    assert_eq!(v["gpu_memory"]["context"], 100);
    assert_eq!(v["dtypes"]["checkpoint"], serde_json::json!(["BF16"]));

    // It is not overwritten unasked, and not reinterpreted.
    horizon(&["pack", src, "-o", dest]).fails(1, &["stories.hz", "--force"]);
    horizon(&["pack", src, "-o", dest, "--force", "--quantizer", "absmax"]).ok();
    let refused = |more: &[&str], parts: &[&str]| {
        horizon(&[&["run", "hi", "-m", dest], more].concat()).fails(1, parts);
    };
    refused(&["--block", "32"], &["--block 32", "256"]);
    refused(&["--quantizer", "mse"], &["--quantizer mse", "absmax"]);
    refused(&["--experts", "f16"], &["--experts f16", "original checkpoint"]);
    horizon(&["pack", dest, "-o", as_str(&folder.path().join("again"))]).fails(1, &["already"]);
}

#[test]
fn a_flipped_bit_is_found_by_verify_and_by_loading() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = demo_checkpoint(folder.path());
    let artifact = folder.path().join("stories.hz");
    let dest = as_str(&artifact);
    horizon(&["pack", as_str(&dir), "-o", dest]).ok();
    let shard = fs::read_dir(&artifact)
        .expect("is a directory")
        .map(|e| e.expect("an entry").path())
        .find(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .expect("has a shard");
    let name = shard
        .file_name()
        .and_then(|n| n.to_str())
        .expect("UTF-8")
        .to_owned();
    let mut bytes = fs::read(&shard).expect("is readable");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&shard, &bytes).expect("writes");
    horizon(&["inspect", dest, "--verify"]).fails(1, &[&name]);
    horizon(&["run", "hi", "-m", dest]).fails(1, &[&name]);
    bytes.truncate(middle);
    fs::write(&shard, &bytes).expect("writes");
    horizon(&["inspect", dest, "--verify"]).fails(1, &[&name]);
    horizon(&["inspect", dest]).fails(1, &[&name]);
}

#[test]
fn inspect_tells_what_a_model_is_and_needs() {
    let text = horizon(&["inspect"]).ok().stdout;
    for part in [
        "family           olmoe",
        "checkpoint       BF16",
        "quantized source BF16",
        "scale            F16",
        "activation       F16",
        "accumulation     F32",
        "non-routed       F16",
        "16 in each of 5 layers, 4 a token",
        "relative RMSE",
        "host memory",
        "c4/16",
        "c16/16",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let dir = demo_checkpoint(folder.path());
    let checkpoint = horizon(&["inspect", "-m", as_str(&dir), "--json"]).ok().json();
    let embedded = horizon(&["inspect", "--json"]).ok().json();
    for key in [
        "spec",
        "parameters",
        "dtypes",
        "quantization_error",
        "gpu_memory",
        "host_memory",
    ] {
        assert_eq!(checkpoint[key], embedded[key], "{key}");
    }
    let f16 = horizon(&["inspect", "--experts", "f16", "--activations", "f32", "--json"])
        .ok()
        .json();
    assert_eq!(
        (&f16["experts"]["encoding"], &f16["dtypes"]["activation"]),
        (&"f16".into(), &"F32".into())
    );
    assert!(
        f16["host_memory"]["weights"]["experts"].as_u64()
            > embedded["host_memory"]["weights"]["experts"].as_u64()
    );
}

#[test]
fn a_prediction_is_what_an_engine_reports() {
    let v = horizon(&["inspect", "--json"]).ok().json();
    let b = horizon(&["bench", "decode", "--tokens", "2", "--json"])
        .ok()
        .json();
    assert_eq!(v["host_memory"]["total"], b["predicted"]["total"]);
}
