//! What cannot be opened, packed or loaded, and how it says so.

use super::*;

fn open_error(path: &Path) -> String {
    match ModelSource::open(path) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(e) => e.to_string(),
    }
}

/// The error says all of these.
#[track_caller]
fn says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

#[test]
fn paths_that_are_no_model() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let at = |name: &str| dir.path().join(name);
    says(
        &open_error(&at("absent")),
        &["absent", "no such file or directory"],
    );
    fs::write(at("m.gguf"), b"GGUF\x03\0\0\0").expect("write");
    says(
        &open_error(&at("m.gguf")),
        &["m.gguf", "GGUF", "safetensors checkpoint"],
    );
    fs::write(at("renamed.bin"), b"GGUF\x03\0\0\0").expect("write");
    says(&open_error(&at("renamed.bin")), &["GGUF"]);
    fs::write(at("model.safetensors"), b"12345678").expect("write");
    says(
        &open_error(&at("model.safetensors")),
        &["one file of a checkpoint", "give the directory"],
    );
    fs::write(at("notes.txt"), b"").expect("write");
    says(
        &open_error(&at("notes.txt")),
        &["notes.txt", "give the directory"],
    );
    for (name, part) in [
        ("", "is empty"),
        ("m.gguf", "GGUF"),
        ("pytorch_model.bin", "convert"),
        (
            "model-00001-of-00002.safetensors",
            "download the whole checkpoint",
        ),
        ("README.md", "no weights"),
        (".horizon-pack", "so far"),
        ("snapshots", "hub's cache"),
    ] {
        let sub = at(&format!("directory {part}"));
        fs::create_dir(&sub).expect("create");
        if !name.is_empty() {
            fs::write(sub.join(name), b"x").expect("write");
        }
        says(&open_error(&sub), &[sub.to_str().expect("UTF-8"), part]);
    }
}

#[test]
fn checkpoints_with_something_missing() {
    let tiny = Tiny::olmoe();
    let (_dir, hub, _) = scene(&tiny, Dtype::BF16, 2);
    fs::remove_file(hub.join("model-00002-of-00002.safetensors")).expect("remove");
    says(
        &open_error(&hub),
        &["model-00002-of-00002.safetensors", "missing"],
    );

    let (_dir, hub, _) = scene(&tiny, Dtype::BF16, 1);
    fs::remove_file(hub.join("config.json")).expect("remove");
    says(&open_error(&hub), &["config.json"]);

    let name = "model.layers.1.mlp.experts.2.up_proj.weight";
    let mut less = tiny.clone();
    less.tensors.remove(name);
    let (_dir, hub, _) = scene(&less, Dtype::BF16, 1);
    says(&open_error(&hub), &[name, "no tensor"]);

    let mut other = tiny.clone();
    other.tensors.get_mut(name).expect("there").0 = vec![72, 40];
    let (_dir, hub, _) = scene(&other, Dtype::BF16, 1);
    says(
        &open_error(&hub),
        &["model.safetensors", name, "[72, 40]", "[40, 72]"],
    );

    let (_dir, hub, _) = scene(&tiny, Dtype::F64, 1);
    says(&open_error(&hub), &["model.safetensors", "F64", "BF16"]);

    let (_dir, hub, _) = scene(&tiny, Dtype::BF16, 2);
    let index = hub.join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).expect("readable");
    fs::write(&index, text.replace("model-00001", "../model-00001")).expect("write");
    says(&open_error(&hub), &["index.json", "plain file name"]);
    fs::write(&index, text.replace("model.norm.weight", "model.norms.weight")).expect("write");
    says(&open_error(&hub), &["model.norms.weight"]);
    fs::write(&index, b"{}").expect("write");
    says(&open_error(&hub), &["index.json", "weight_map"]);
}

#[test]
fn a_width_that_is_no_multiple_of_8() {
    let mut tiny = Tiny::olmoe();
    tiny.config["intermediate_size"] = 36.into();
    let (_dir, hub, _) = scene(&tiny, Dtype::BF16, 1);
    says(&open_error(&hub), &["intermediate_size", "36", "multiple of 8"]);
}

#[test]
fn damaged_headers_of_a_checkpoint() {
    let tiny = Tiny::olmoe();
    let (_dir, hub, _) = scene(&tiny, Dtype::BF16, 1);
    let path = hub.join("model.safetensors");
    let bytes = fs::read(&path).expect("readable");
    let mut huge = bytes.clone();
    huge[..8].copy_from_slice(&(1u64 << 63).to_le_bytes());
    fs::write(&path, &huge).expect("write");
    says(&open_error(&hub), &["model.safetensors", "9223372036854775808"]);
    let header =
        8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"))).expect("small");
    for n in (0..20).chain([header - 1, header, header + 1, bytes.len() - 1]) {
        fs::write(&path, &bytes[..n]).expect("write");
        says(&open_error(&hub), &["model.safetensors"]);
    }
    // A flipped byte may rename a tensor that is not needed, or a space; then the model is the same.
    let source = ModelSource::open(&{
        fs::write(&path, &bytes).expect("write");
        hub.clone()
    })
    .expect("whole again");
    let honest = source
        .load(&LoadOptions::default(), &Canonical, &Silent)
        .expect("loads");
    for at in 0..header {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 7);
        let Ok(source) = ModelSource::in_memory("flipped", tiny.files(), bad) else {
            continue;
        };
        let model = source
            .load(&LoadOptions::default(), &Canonical, &Silent)
            .expect("what opens loads");
        assert_same(&model, &honest);
    }
}

#[test]
fn weights_that_cannot_be_held() {
    let name = "model.layers.0.mlp.experts.1.down_proj.weight";
    let before = Tiny::olmoe();
    let (_dir, old_hub, dest) = scene(&before, Dtype::F32, 1);
    packed(&old_hub, &dest, &PackOptions::default()).expect("packs");
    let kept = files_in(&dest);
    for (value, parts) in [
        (f32::NAN, ["NaN or infinite", "row 7, block 1"]),
        (f32::NEG_INFINITY, ["NaN or infinite", "row 7, block 1"]),
        (600_000.0, ["524160", "row 7, block 1"]),
    ] {
        let mut tiny = before.clone();
        tiny.set(name, 7 * 40 + 33, value);
        let (_dir, hub, _) = scene(&tiny, Dtype::F32, 1);
        let options = PackOptions {
            block: BlockSize::B32,
            force: true,
            ..PackOptions::default()
        };
        let error = packed(&hub, &dest, &options).expect_err("not packed").to_string();
        says(&error, &["model.safetensors", name]);
        says(&error, &parts);
        assert_eq!(files_in(&dest), kept, "the artifact that was there is untouched");
        let source = ModelSource::open(&hub).expect("headers are sound");
        let experts = settings(BlockSize::B32, Quantizer::Mse);
        let options = LoadOptions {
            experts,
            ..LoadOptions::default()
        };
        let error = source
            .load(&options, &Canonical, &Silent)
            .expect_err("not loaded")
            .to_string();
        says(&error, &["model.safetensors", name]);
        says(&error, &parts);
    }
    let mut tiny = before;
    tiny.set("lm_head.weight", 100, 70_000.0);
    let (_dir, hub, _) = scene(&tiny, Dtype::F32, 1);
    let error = packed(
        &hub,
        &dest,
        &PackOptions {
            force: true,
            ..PackOptions::default()
        },
    )
    .expect_err("not packed");
    says(
        &error.to_string(),
        &[
            "model.safetensors",
            "lm_head.weight",
            "element 100",
            "70000",
            "FP16",
        ],
    );
}

#[test]
fn settings_that_contradict_the_artifact() {
    let (_dir, hub, dest) = scene(&Tiny::olmoe(), Dtype::BF16, 1);
    let options = PackOptions {
        block: BlockSize::B64,
        quantizer: Quantizer::Absmax,
        ..PackOptions::default()
    };
    packed(&hub, &dest, &options).expect("packs");
    let source = ModelSource::open(&dest).expect("sound");
    let with = |experts| {
        let options = LoadOptions {
            experts,
            ..LoadOptions::default()
        };
        source
            .load(&options, &Canonical, &Silent)
            .expect_err("contradicts")
            .to_string()
    };
    says(
        &with(ExpertsMode::F16),
        &["m.hz", "--experts f16", "original checkpoint"],
    );
    let other = settings(BlockSize::B128, Quantizer::Absmax);
    says(&with(other), &["m.hz", "--block 128", "packed with 64"]);
    let other = settings(BlockSize::B64, Quantizer::Mse);
    says(&with(other), &["m.hz", "--quantizer mse", "packed with absmax"]);
    let error = packed(&dest, &hub.join("again"), &PackOptions::default()).expect_err("packed already");
    says(&error.to_string(), &["m.hz", "artifact already"]);
}

#[test]
fn an_edited_artifact() {
    let (_dir, hub, dest) = scene(&Tiny::olmoe(), Dtype::BF16, 1);
    packed(&hub, &dest, &PackOptions::default()).expect("packs");
    let config = dest.join("config.json");
    let honest = fs::read_to_string(&config).expect("readable");
    fs::write(&config, honest.replace("10000.0", "20000.0")).expect("write");
    says(
        &open_error(&dest),
        &["config.json", "damaged or was edited", "horizon pack --force"],
    );
    fs::write(&config, &honest).expect("write");
    let tokenizer = dest.join("tokenizer.json");
    let text = fs::read_to_string(&tokenizer).expect("readable");
    fs::write(&tokenizer, text.replace("1.0", "1.1")).expect("write");
    let source = ModelSource::open(&dest).expect("files beside the weights are checked when they are read");
    says(
        &source.file("tokenizer.json").expect_err("edited").to_string(),
        &["tokenizer.json", "edited"],
    );

    // A weight that changes after opening is found at load.
    let shard = dest.join("model-00002-of-00003.safetensors");
    let mut bytes = fs::read(&shard).expect("readable");
    *bytes.last_mut().expect("not empty") ^= 1;
    fs::write(&shard, bytes).expect("write");
    let error = source
        .load(&LoadOptions::default(), &Canonical, &Silent)
        .expect_err("damaged")
        .to_string();
    says(
        &error,
        &[
            "model-00002-of-00003.safetensors",
            "model.layers.0.mlp.experts.2",
            "damaged",
        ],
    );
}

#[test]
fn a_manifest_of_another_model() {
    let (_dir, hub, dest) = scene(&Tiny::olmoe(), Dtype::BF16, 1);
    packed(&hub, &dest, &PackOptions::default()).expect("packs");
    let path = dest.join("manifest.json");
    let text = fs::read_to_string(&path).expect("readable");
    for (from, to, part) in [
        (
            "\"rope_theta\": 10000.0",
            "\"rope_theta\": 20000.0",
            "config.json describes",
        ),
        (
            "experts.2.up_proj.weight.scales",
            "experts.2.up_proj.weight.scalez",
            "header",
        ),
    ] {
        let mut forged = text.replace(from, to).into_bytes();
        assert_ne!(forged, text.as_bytes(), "{from}");
        forged[24..88].fill(b'0');
        let digest = horizon_core::artifact::Digest::of(&forged).to_string();
        forged[24..88].copy_from_slice(digest.as_bytes());
        fs::write(&path, forged).expect("write");
        says(
            &open_error(&dest),
            &["manifest.json", part, "horizon pack --force"],
        );
    }
}
