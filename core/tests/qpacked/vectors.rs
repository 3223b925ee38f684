//! The golden vectors, by every path of this CPU: codes, scales, packed bytes, values, errors, digests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use horizon_core::dtype::{DType, widen};
use horizon_core::qpacked::{BlockSize, CodecPath, QuantizeErrorKind, Quantizer};
use horizon_core::synthetic::Recipe;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::support::{Packed, bits};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qpacked")
}

fn read(name: &str) -> Vec<u8> {
    let path = fixtures().join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn index() -> Value {
    serde_json::from_slice(&read("index.json")).expect("index.json is JSON")
}

fn f32s(tensor: &TensorView<'_>) -> Vec<f32> {
    tensor
        .data()
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect()
}

fn u16s(tensor: &TensorView<'_>) -> Vec<u16> {
    tensor
        .data()
        .as_chunks::<2>()
        .0
        .iter()
        .map(|b| u16::from_le_bytes(*b))
        .collect()
}

fn shape(tensor: &TensorView<'_>) -> (usize, usize) {
    let [rows, cols] = tensor.shape() else {
        panic!("not a matrix: {:?}", tensor.shape())
    };
    (*rows, *cols)
}

/// Calls `check` with the inputs whose names do, or do not, start with `error.`, once for each combination of
/// block size, quantizer and path.
fn each_input(
    errors: bool,
    mut check: impl FnMut(&str, &[f32], (usize, usize), BlockSize, Quantizer, CodecPath),
) {
    let file = read("inputs.safetensors");
    let inputs = SafeTensors::deserialize(&file).expect("inputs");
    let mut names = inputs.names();
    names.retain(|name| name.starts_with("error.") == errors);
    assert_eq!(names.len(), if errors { 7 } else { 15 }, "cases of the vectors");
    for name in names {
        let tensor = inputs.tensor(name).expect("listed");
        for block in BlockSize::ALL {
            for quantizer in Quantizer::ALL {
                for path in CodecPath::available() {
                    check(name, &f32s(&tensor), shape(&tensor), block, quantizer, path);
                }
            }
        }
    }
}

#[test]
fn every_path_reproduces_the_vectors() {
    let index = index();
    let outputs: BTreeMap<String, Vec<u8>> = Quantizer::ALL
        .into_iter()
        .flat_map(|quantizer| BlockSize::ALL.map(|block| format!("{quantizer}-b{block}")))
        .map(|name| (name.clone(), read(&format!("{name}.safetensors"))))
        .collect();
    each_input(false, |case, weights, shape, block, quantizer, path| {
        let context = format!("{case}, {quantizer}, B = {block}, {path}");
        let want = SafeTensors::deserialize(&outputs[&format!("{quantizer}-b{block}")]).expect("outputs");
        let want = |what: &str| want.tensor(&format!("{case}.{what}"));
        let got = Packed::quantize(path, case, weights, shape, block, quantizer).expect(&context);
        assert_eq!(
            got.unpacked(),
            want("codes").expect("codes").data(),
            "codes of {context}"
        );
        assert_eq!(
            got.scale_bits(),
            u16s(&want("scales").expect("scales")),
            "scales of {context}"
        );
        if quantizer == Quantizer::Absmax {
            let values = f32s(&want("dequant").expect("dequant"));
            assert_eq!(bits(&got.dequantize(path)), bits(&values), "values of {context}");
            if block == BlockSize::B256 {
                assert_eq!(
                    got.codes,
                    want("packed").expect("packed").data(),
                    "bytes of {context}"
                );
            }
        }
        let column = usize::from(quantizer == Quantizer::Mse);
        let rms = index["rel_rmse"][case][format!("b{block}")][column].as_f64();
        let rms = rms.unwrap_or_else(|| {
            if weights.iter().all(|w| *w == 0.0) {
                0.0
            } else {
                panic!("{case}")
            }
        });
        // The vectors give five digits, so half a unit of the last one may be 5e-5 of the value.
        assert!(
            (got.error.relative_rms() - rms).abs() <= 5e-5 * rms,
            "error of {context}: {:?}",
            got.error
        );
    });
}

#[test]
fn every_path_names_the_first_bad_block() {
    let index = index();
    each_input(true, |case, weights, shape, block, quantizer, path| {
        let context = format!("{case}, {quantizer}, B = {block}, {path}");
        let got = Packed::quantize(path, "layers.3.w1", weights, shape, block, quantizer);
        let got = got.err().unwrap_or_else(|| panic!("{context} was accepted"));
        let case = case.strip_prefix("error.").expect("filtered by it");
        let want = &index["errors"][case][format!("b{block}")];
        let kind = match want["kind"].as_str() {
            Some("NonFinite") => QuantizeErrorKind::NonFinite,
            Some("ScaleOverflow") => QuantizeErrorKind::ScaleOverflow,
            other => panic!("{context}: {other:?}"),
        };
        assert_eq!(got.kind, kind, "{context}");
        assert_eq!(Some(got.row as u64), want["row"].as_u64(), "{context}");
        assert_eq!(Some(got.block as u64), want["block"].as_u64(), "{context}");
        let text = got.to_string();
        let place = format!(
            "tensor layers.3.w1, row {}, block {} of the row: ",
            got.row, got.block
        );
        assert!(text.starts_with(&place), "{text}");
        let cause = if kind == QuantizeErrorKind::NonFinite {
            "NaN or infinite"
        } else {
            "524160 or more"
        };
        assert!(text.contains(cause), "{text}");
    });
}

/// The routed experts of a golden model, by name.
fn experts(model: &str) -> BTreeMap<String, ((usize, usize), Vec<f32>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/fixtures/goldens");
    let path = path.join(model).join("tensors.tsv");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let recipe = Recipe::parse(&text).expect("well formed");
    let experts = recipe
        .tensors
        .iter()
        .filter(|rule| rule.name.contains(".experts."))
        .map(|rule| {
            let mut bytes = vec![0; rule.bytes()];
            rule.fill(recipe.seed, 0, &mut bytes);
            let mut weights = vec![0.0; rule.elements()];
            widen(DType::BF16, &bytes, &mut weights);
            (rule.name.clone(), ((rule.shape[0], rule.shape[1]), weights))
        });
    experts.collect()
}

fn hex(digest: Sha256) -> String {
    digest.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn the_experts_of_whole_models_have_the_recorded_digests() {
    let index = index();
    for model in ["olmoe-tiny-a", "qwen2moe-tiny-a"] {
        let experts = experts(model);
        assert!(
            experts.len() >= 36,
            "{model} has {} expert tensors",
            experts.len()
        );
        let want = &index["experts"][model];
        for path in CodecPath::available() {
            // The scalar path is held to the vectors above; here it would take most of the time.
            let slow = |quantizer| path == CodecPath::Scalar && quantizer == Quantizer::Mse;
            for quantizer in Quantizer::ALL.into_iter().filter(|q| !slow(*q)) {
                for block in BlockSize::ALL {
                    let (mut codes, mut scales) = (Sha256::new(), Sha256::new());
                    for (name, (shape, weights)) in &experts {
                        let got = Packed::quantize(path, name, weights, *shape, block, quantizer);
                        let got = got.expect("finite weights");
                        codes.update(got.unpacked());
                        scales.update(
                            got.scale_bits()
                                .into_iter()
                                .flat_map(u16::to_le_bytes)
                                .collect::<Vec<u8>>(),
                        );
                    }
                    let want = &want[format!("{quantizer}-b{block}")];
                    let context = format!("{model}, {quantizer}, B = {block}, {path}");
                    assert_eq!(
                        Some(&hex(codes)[..]),
                        want["codes"].as_str(),
                        "codes of {context}"
                    );
                    assert_eq!(
                        Some(&hex(scales)[..]),
                        want["scales"].as_str(),
                        "scales of {context}"
                    );
                }
            }
        }
    }
}
