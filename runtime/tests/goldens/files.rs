//! Golden files, and how a result is held against them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use horizon_core::artifact::Silent;
use horizon_core::synthetic::{Recipe, write_recipe};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Folder of the golden models.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/goldens")
}

/// Parses a JSON file.
pub fn json(path: &Path) -> Value {
    let text = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A list of token ids.
pub fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap_or_else(|e| panic!("not a list of token ids: {e}: {value}"))
}

/// The tensors of a golden file, as FP32 and as integers.
#[derive(Default)]
pub struct Tensors {
    /// Real tensors.
    pub real: BTreeMap<String, Vec<f32>>,
    /// Integer tensors.
    pub integer: BTreeMap<String, Vec<i32>>,
}

impl Tensors {
    /// Reads a compressed safetensors file.
    pub fn read(path: &Path) -> Self {
        let packed = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let bytes = zstd::decode_all(&packed[..]).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut all = Self::default();
        for (name, view) in file.tensors() {
            let words = view.data().as_chunks::<4>().0;
            match view.dtype() {
                Dtype::F32 => {
                    all.real
                        .insert(name, words.iter().map(|b| f32::from_le_bytes(*b)).collect());
                }
                Dtype::I32 => {
                    all.integer
                        .insert(name, words.iter().map(|b| i32::from_le_bytes(*b)).collect());
                }
                other => panic!("{}: {name} has type {other:?}", path.display()),
            }
        }
        all
    }
}

/// Writes the checkpoint of a golden model to `out`, with the configuration file named.
pub fn write_checkpoint(model: &str, config: &str, out: &Path) {
    let from = fixtures().join(model);
    let recipe = fs::read_to_string(from.join("tensors.tsv")).expect("a golden model has a recipe");
    write_recipe(out, &Recipe::parse(&recipe).expect("recipes are sound"), &Silent).expect("written");
    fs::copy(from.join(config), out.join("config.json")).expect("a golden model has both configurations");
}

/// How far a result may be from its golden.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// |a − b| / |b| over a tensor.
    pub rel_rms: f64,
    /// max |a − b| / rms(b) over a tensor.
    pub max_over_rms: f64,
}

/// The tolerances of one arithmetic, by the kind of tensor.
pub struct Tolerances(BTreeMap<String, Tolerance>);

impl Tolerances {
    /// Those of `f32` or `fp16`.
    pub fn of(arithmetic: &str) -> Self {
        let all = json(&fixtures().join("tolerances.json"));
        let kinds = all["tolerances"].as_object().expect("tolerances by kind");
        let number = |v: &Value| v.as_f64().expect("a tolerance is a number");
        Self(
            kinds
                .iter()
                .map(|(kind, t)| {
                    let t = &t[arithmetic];
                    let (rel_rms, max_over_rms) = (number(&t["rel_rms"]), number(&t["max_over_rms"]));
                    (
                        kind.clone(),
                        Tolerance {
                            rel_rms,
                            max_over_rms,
                        },
                    )
                })
                .collect(),
        )
    }

    /// The tolerance of a tensor called e.g. `hidden.1`.
    pub fn for_tensor(&self, name: &str) -> Tolerance {
        let kind = name.split('.').next().unwrap_or(name);
        *self
            .0
            .get(kind)
            .unwrap_or_else(|| panic!("there is no tolerance for {name}"))
    }
}

/// What is wrong with `got`, if anything is. A value that is not finite is always wrong, as is a golden that is
/// not finite or all zero: it could tell nothing.
#[must_use]
pub fn difference(got: &[f32], want: &[f32], tolerance: Tolerance) -> Option<String> {
    if got.len() != want.len() {
        return Some(format!("{} values, not {}", got.len(), want.len()));
    }
    if let Some(i) = got.iter().position(|v| !v.is_finite()) {
        return Some(format!("value {i} is {}", got[i]));
    }
    let (mut squares, mut error, mut largest) = (0f64, 0f64, 0f64);
    for (g, w) in got.iter().zip(want) {
        let d = f64::from(*g) - f64::from(*w);
        squares += f64::from(*w).powi(2);
        error += d * d;
        largest = largest.max(d.abs());
    }
    if !(squares > 0.0 && squares.is_finite()) {
        return Some("the golden is empty, zero or not finite".into());
    }
    let rel_rms = (error / squares).sqrt();
    let max_over_rms = largest / (squares / want.len() as f64).sqrt();
    let sound = rel_rms <= tolerance.rel_rms && max_over_rms <= tolerance.max_over_rms;
    (!sound).then(|| {
        let Tolerance {
            rel_rms: r,
            max_over_rms: m,
        } = tolerance;
        format!("rel_rms {rel_rms:.2e} (at most {r:.0e}), max_over_rms {max_over_rms:.2e} (at most {m:.0e})")
    })
}
