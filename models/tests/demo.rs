//! The compressed demo models restore to the checkpoints that they were made from.

use std::fmt::Write as _;
use std::path::Path;

use horizon_models::demo::{self, DemoError};
use sha2::{Digest, Sha256};

fn asset(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, b| {
        write!(text, "{b:02x}").expect("a string grows");
        text
    })
}

#[test]
fn both_models_restore_to_their_checksum() {
    let readme = String::from_utf8(asset("README.md")).expect("UTF-8");
    for model in ["stories-olmoe", "stories-qwen2moe"] {
        let weights =
            demo::restore_weights(&asset(&format!("{model}/weights.planes.zst"))).expect("restores");
        let digest = sha256(&weights);
        assert!(
            readme.contains(&digest),
            "{model}: {digest} is not the digest in assets/README.md"
        );
        // The way back gives the compressed file's content.
        let split = demo::split_planes(&weights).expect("splits");
        assert_eq!(
            sha256(&split),
            sha256(&demo::decompress(&asset(&format!("{model}/weights.planes.zst"))).expect("zstd"))
        );
    }
}

#[cfg(feature = "embedded-demo")]
#[test]
fn the_embedded_model_is_complete() {
    let demo = demo::embedded().expect("restores");
    assert_eq!(
        sha256(&demo.safetensors),
        "e6c7826580410ddd3dd7e783468cc37b766a56b07ddefda3b15f8be36a01cd9b"
    );
    let config = serde_json::from_slice(&demo.files["config.json"]).expect("JSON");
    let resolved = horizon_models::family::resolve(&config).expect("resolves");
    let tensors = safetensors::SafeTensors::deserialize(&demo.safetensors).expect("safetensors");
    for (role, shape) in horizon_core::roles::dense_tensors(&resolved.spec) {
        let name = resolved.names.dense(role);
        assert_eq!(
            tensors
                .tensor(&name)
                .unwrap_or_else(|e| panic!("{name}: {e}"))
                .shape(),
            shape,
            "{name}"
        );
    }
    horizon_models::tokenizer::Tokenizer::from_bytes(&demo.files["tokenizer.json"]).expect("loads");
    for name in [
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ] {
        assert!(demo.files.contains_key(name), "{name}");
    }
}

#[test]
fn damaged_files_are_errors() {
    let good = asset("stories-qwen2moe/weights.planes.zst");
    assert!(matches!(
        demo::restore_weights(&good[..good.len() / 2]),
        Err(DemoError::Compressed(_))
    ));
    assert!(matches!(
        demo::restore_weights(b"not zstd"),
        Err(DemoError::Compressed(_))
    ));
    let mut header = u64::MAX.to_le_bytes().to_vec();
    for (bytes, what) in [(&b"1234567"[..], "short"), (&header.clone()[..], "header")] {
        let file = zstd::bulk::compress(bytes, 1).expect("compresses");
        assert!(
            matches!(demo::restore_weights(&file), Err(DemoError::Layout(_))),
            "{what}"
        );
    }
    header = 2u64.to_le_bytes().to_vec();
    header.extend_from_slice(b"{}abc");
    assert_eq!(
        demo::split_planes(&header),
        Err(DemoError::Layout("an odd number of data bytes"))
    );
}
