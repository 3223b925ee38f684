//! The store of the non-routed weights: which are converted to q8, and how many bytes they take.

use half::f16;
use horizon_core::dense::{
    DenseFormat, DenseMatrix, DenseSource, DenseStore, HeldTensor, SourceError, conversion_bytes,
    held_tensors,
};
use horizon_core::dense_q8::{Q8Matrix, Q8Rows};
use horizon_core::dtype::NarrowingReport;
use horizon_core::ids::LayerId;
use horizon_core::roles::{DenseRole, LayerRole, dense_tensors};
use horizon_core::spec::{
    AttentionSpec, FeedForward, LayerSpec, ModelSpec, MoeSpec, QkNorm, SharedExpertSpec,
};
use horizon_core::synthetic::RandomWeights;

/// Every role, widths that are no multiple of a block.
fn spec(tied_embeddings: bool) -> ModelSpec {
    let moe = MoeSpec {
        experts: 4,
        top_k: 2,
        width: 24,
        renormalize: false,
        shared: Some(SharedExpertSpec {
            width: 40,
            gated: true,
        }),
    };
    let layer = |feed_forward| LayerSpec {
        window: None,
        feed_forward,
    };
    ModelSpec {
        family: "test".into(),
        vocab: 50,
        hidden: 72,
        context: 8,
        rms_norm_eps: 1e-5,
        tied_embeddings,
        attention: AttentionSpec {
            heads: 2,
            kv_heads: 1,
            head_dim: 20,
            qk_norm: QkNorm::PerHead,
            qkv_bias: true,
            output_bias: true,
            clip_qkv: None,
            rope_theta: 1e4,
        },
        layers: vec![
            layer(FeedForward::Dense { width: 104 }),
            layer(FeedForward::Moe(moe)),
        ],
    }
}

const CONVERTED: [LayerRole; 10] = [
    LayerRole::Query,
    LayerRole::Key,
    LayerRole::Value,
    LayerRole::Output,
    LayerRole::SharedGate,
    LayerRole::SharedUp,
    LayerRole::SharedDown,
    LayerRole::DenseGate,
    LayerRole::DenseUp,
    LayerRole::DenseDown,
];

#[test]
fn q8_replaces_the_matrices_of_the_named_roles_and_nothing_else() {
    for tied in [false, true] {
        let spec = spec(tied);
        let plain = DenseStore::load(&spec, &RandomWeights(3)).expect("loads");
        let q8 = DenseStore::load_as(&spec, DenseFormat::Q8, &RandomWeights(3)).expect("loads");
        assert_eq!((plain.format(), q8.format()), (DenseFormat::F16, DenseFormat::Q8));
        let mut converted = Vec::new();
        for (role, shape) in dense_tensors(&spec) {
            let want = plain.get(role).expect("FP16 holds all as FP16");
            match q8.matrix(role).expect("there") {
                DenseMatrix::F16 { values, .. } => {
                    assert_eq!(values, want, "{role:?}");
                    assert_eq!(q8.get(role), Some(want));
                }
                DenseMatrix::Q8(rows) => {
                    assert_eq!(q8.get(role), None);
                    assert_same(rows, want, shape[1], role);
                    converted.push(role);
                }
            }
        }
        let want: Vec<DenseRole> = dense_tensors(&spec)
            .into_iter()
            .map(|(role, _)| role)
            .filter(|role| match role {
                DenseRole::OutputHead => true,
                DenseRole::Layer(_, l) => CONVERTED.contains(l),
                _ => false,
            })
            .collect();
        assert_eq!(converted, want);
        assert_eq!(converted.len(), 4 * 2 + 3 + 3 + usize::from(!tied));
        // The head: of its own, or a copy of the table, which stays.
        let head = if tied {
            DenseRole::Embedding
        } else {
            DenseRole::OutputHead
        };
        assert_eq!((plain.head_role(), q8.head_role()), (head, DenseRole::OutputHead));
        let Some(DenseMatrix::Q8(rows)) = q8.matrix(q8.head_role()) else {
            panic!("the head is q8")
        };
        assert_same(rows, plain.get(head).expect("there"), 72, head);
    }
}

fn assert_same(rows: Q8Rows<'_>, values: &[f16], cols: usize, role: DenseRole) {
    let want = Q8Matrix::quantize(values, cols).expect("finite");
    assert_eq!(
        (rows.codes, rows.scales, rows.cols),
        (&want.codes[..], &want.scales[..], cols),
        "{role:?}"
    );
}

#[test]
fn the_bytes_held_are_those_foretold() {
    for (tied, format) in [
        (false, DenseFormat::F16),
        (false, DenseFormat::Q8),
        (true, DenseFormat::Q8),
    ] {
        let spec = spec(tied);
        let store = DenseStore::load_as(&spec, format, &RandomWeights(3)).expect("loads");
        let held: usize = held_tensors(&spec, format)
            .iter()
            .map(HeldTensor::held_bytes)
            .sum();
        assert_eq!(store.bytes(), held);
    }
    // 40 x 72: 2880 codes, three scales a row; FP16 twice as many bytes as there are values.
    let tensors = held_tensors(&spec(false), DenseFormat::Q8);
    let query = DenseRole::Layer(LayerId(1), LayerRole::Query);
    let query = tensors.iter().find(|t| t.role == query).expect("there");
    assert_eq!(
        (query.payload_bytes(), query.held_bytes()),
        (2880 + 240, 2880 + 256)
    );
    // The largest that are converted: 104 x 72 three times, 50 x 72 (the head, unless it is a copy), 72 x 40.
    let foretold = |tied, threads| conversion_bytes(&spec(tied), DenseFormat::Q8, threads);
    assert_eq!(
        (foretold(false, 1), foretold(false, 4)),
        (104 * 144, 3 * 104 * 144 + 50 * 144)
    );
    assert_eq!(foretold(true, 4), 3 * 104 * 144 + 72 * 80);
    assert_eq!(conversion_bytes(&spec(false), DenseFormat::F16, 4), 0);
}

#[test]
fn a_weight_without_a_q8_form_is_named() {
    struct Infinite;
    impl DenseSource for Infinite {
        fn read(
            &self,
            role: DenseRole,
            shape: &[usize],
            out: &mut [f16],
        ) -> Result<NarrowingReport, SourceError> {
            let report = RandomWeights(3).read(role, shape, out);
            if role == DenseRole::Layer(LayerId(1), LayerRole::Key) {
                out[73] = f16::INFINITY;
            }
            report
        }
    }
    assert!(DenseStore::load(&spec(false), &Infinite).is_ok());
    let error = DenseStore::load_as(&spec(false), DenseFormat::Q8, &Infinite).expect_err("an infinity");
    let text = error.to_string();
    assert!(text.contains("Key") && text.contains("row 1, column 1"), "{text}");
}
