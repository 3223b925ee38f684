//! Synthetic checkpoints run like real ones, and their routing spreads.

use horizon_core::artifact::Silent;
use horizon_core::backend::Activations;
use horizon_core::dense::DenseFormat;
use horizon_core::synthetic::{Shape, SyntheticSpec, write_checkpoint};
use horizon_models::source::{ExpertsMode, ModelSource};
use horizon_models::tokenizer::Tokenizer;
use horizon_runtime::routing_load::RoutingLoad;

use crate::arm::{Arm, Which};

/// Tokens run through each model.
const TOKENS: usize = 384;

/// A shape with its own number of layers, experts and experts a token, but narrow.
fn narrow(name: &str) -> Shape {
    let mut shape = Shape::named(name).expect("a known name");
    shape.hidden = 256;
    shape.heads = 8;
    shape.kv_heads = shape.kv_heads.min(8);
    shape.head_dim = shape.head_dim.map(|_| 32);
    shape.width = 64;
    shape.shared_width = shape.shared_width.min(128);
    shape.vocab = 2048;
    shape
}

#[test]
fn random_tokens_use_all_experts_of_every_layer() {
    for name in Shape::NAMES {
        let out = tempfile::tempdir().expect("a temporary directory");
        let dir = out.path().join("model");
        let spec = SyntheticSpec::new(narrow(name), 1);
        write_checkpoint(&dir, &spec, &Silent).expect("written");
        let source = ModelSource::open(&dir).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(**source.spec(), spec.shape.model_spec().expect("valid"), "{name}");

        let experts = ExpertsMode::default();
        let mut running = Arm {
            backend: Which::Fast,
            activations: Activations::F16,
            experts,
            dense: DenseFormat::F16,
        }
        .open(&source);
        let load = RoutingLoad::measure(
            running.model.as_mut(),
            &running.experts,
            source.spec(),
            TOKENS,
            32,
            7,
        )
        .expect("runs")
        .expect("every layer routes");
        assert_eq!(load.layers.len(), spec.shape.layers, "{name}");
        for layer in &load.layers {
            // By lot, a load has a standard deviation below the root of its mean.
            let (even, chance) = (load.even(), load.repeated_by_chance());
            assert!(
                layer.least > 0 && (layer.most as f64) < 3.0 * even,
                "{name}: {layer:?}, even {even}"
            );
            assert!(
                layer.repeated < 1.5 * chance,
                "{name}: {layer:?}, by chance {chance}"
            );
        }
    }
}

#[test]
fn the_tokenizer_of_a_synthetic_checkpoint_knows_every_byte() {
    let out = tempfile::tempdir().expect("a temporary directory");
    let dir = out.path().join("model");
    let mut shape = narrow("olmoe");
    shape.layers = 1;
    write_checkpoint(&dir, &SyntheticSpec::new(shape, 1), &Silent).expect("written");
    let source = ModelSource::open(&dir).expect("opens");
    let bytes = source
        .file("tokenizer.json")
        .expect("readable")
        .expect("there is one");
    let tokenizer = Tokenizer::from_bytes(&bytes).expect("a tokenizer");
    let text = "Once, été\u{AD} \u{1F525}\n\t\u{0}<|user|>";
    let ids = tokenizer.encode(text, true).expect("encodes");
    let plain = text.len() - "<|user|>".len();
    assert_eq!(
        ids[..plain],
        text.bytes().take(plain).map(u32::from).collect::<Vec<_>>()
    );
    assert_eq!(ids[plain..], [257]);
    assert_eq!(tokenizer.decode(&ids, false).expect("decodes"), text);
}
