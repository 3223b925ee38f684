//! The one list of models that backends are compared on, small enough for a scalar reference; each has a hazard.

use crate::dense::DenseFormat;
use crate::qpacked::BlockSize;
use crate::record::ExpertEncoding;
use crate::spec::{AttentionSpec, FeedForward, LayerSpec, ModelSpec, MoeSpec, QkNorm, SharedExpertSpec};

/// A model to compare on.
#[derive(Clone, Debug)]
pub struct Case {
    /// What it is, and its hazard.
    pub name: &'static str,
    /// The model.
    pub spec: ModelSpec,
    /// Form of its experts.
    pub encoding: ExpertEncoding,
    /// Forms of its non-routed weights to compare in: q8 where a width or a kind of layer is a hazard to it.
    pub dense: &'static [DenseFormat],
}

fn case(name: &'static str, spec: ModelSpec, encoding: ExpertEncoding) -> Case {
    Case {
        name,
        spec,
        encoding,
        dense: &[DenseFormat::F16],
    }
}

fn with_q8(case: Case) -> Case {
    Case {
        dense: &[DenseFormat::F16, DenseFormat::Q8],
        ..case
    }
}

fn attention(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionSpec {
    AttentionSpec {
        heads,
        kv_heads,
        head_dim,
        qk_norm: QkNorm::None,
        qkv_bias: false,
        output_bias: false,
        clip_qkv: None,
        rope_theta: 1e4,
    }
}

fn moe(experts: usize, top_k: usize, width: usize) -> MoeSpec {
    MoeSpec {
        experts,
        top_k,
        width,
        renormalize: false,
        shared: None,
    }
}

fn model(hidden: usize, attention: AttentionSpec, moe: &MoeSpec, layers: usize) -> ModelSpec {
    let layer = LayerSpec {
        window: None,
        feed_forward: FeedForward::Moe(moe.clone()),
    };
    ModelSpec {
        family: "test".into(),
        vocab: 203,
        hidden,
        context: 160,
        rms_norm_eps: 1e-5,
        tied_embeddings: false,
        attention,
        layers: vec![layer; layers],
    }
}

fn packed(block: BlockSize) -> ExpertEncoding {
    ExpertEncoding::Qpacked { block }
}

/// Qwen3's attention: grouped heads, one norm a head; its head is the embedding table.
fn grouped_heads() -> ModelSpec {
    let renormalized = MoeSpec {
        renormalize: true,
        ..moe(8, 3, 72)
    };
    let mut qwen3 = model(136, attention(4, 2, 24), &renormalized, 2);
    qwen3.attention.qk_norm = QkNorm::PerHead;
    qwen3.attention.output_bias = true;
    qwen3.tied_embeddings = true;
    qwen3
}

/// Layers with a window and without; clipped.
fn windowed() -> ModelSpec {
    let mut windowed = model(192, attention(6, 3, 64), &moe(4, 4, 200), 2);
    windowed.layers[0].window = Some(5);
    windowed.attention.clip_qkv = Some(0.8);
    windowed
}

/// A dense layer before layers with a shared expert that no gate scales.
fn mixed() -> ModelSpec {
    let ungated = MoeSpec {
        shared: Some(SharedExpertSpec {
            width: 40,
            gated: false,
        }),
        ..moe(5, 1, 24)
    };
    let mut mixed = model(72, attention(3, 1, 128), &ungated, 2);
    let dense = LayerSpec {
        window: None,
        feed_forward: FeedForward::Dense { width: 104 },
    };
    mixed.layers.insert(0, dense);
    mixed
}

/// OLMoE's layer in every form of experts, and Qwen2-MoE's in two.
fn families() -> Vec<Case> {
    let mut olmoe = model(128, attention(4, 4, 32), &moe(16, 8, 64), 2);
    olmoe.attention.qk_norm = QkNorm::AllHeads;
    let shared = MoeSpec {
        shared: Some(SharedExpertSpec {
            width: 176,
            gated: true,
        }),
        ..moe(12, 4, 88)
    };
    let mut qwen2 = model(128, attention(4, 4, 32), &shared, 2);
    qwen2.attention.qkv_bias = true;
    vec![
        case(
            "top-8, one norm over all heads",
            olmoe.clone(),
            packed(BlockSize::B64),
        ),
        case("blocks of 32", olmoe.clone(), packed(BlockSize::B32)),
        case("FP16 experts", olmoe, ExpertEncoding::F16),
        with_q8(case(
            "gated shared expert, biases, short last block",
            qwen2.clone(),
            packed(BlockSize::B128),
        )),
        with_q8(case(
            "gated shared expert, FP16 experts",
            qwen2,
            ExpertEncoding::F16,
        )),
    ]
}

/// All cases.
#[must_use]
pub fn cases() -> Vec<Case> {
    let one = model(64, attention(4, 4, 6), &moe(1, 1, 8), 1);
    let many = model(64, attention(1, 1, 256), &moe(300, 11, 32), 1);
    let wide = model(520, attention(2, 2, 16), &moe(3, 2, 1408), 1);
    let mut all = families();
    all.extend([
        with_q8(case(
            "grouped heads 24 wide, norm by head, renormalised top-3, tied head",
            grouped_heads(),
            packed(BlockSize::B32),
        )),
        case(
            "window, clip, every expert used",
            windowed(),
            packed(BlockSize::B256),
        ),
        with_q8(case(
            "dense layer, ungated shared expert, heads 128 wide",
            mixed(),
            packed(BlockSize::B256),
        )),
        with_q8(case("one expert, heads 6 wide", one, packed(BlockSize::B32))),
        case("300 experts, odd k, heads 256 wide", many, packed(BlockSize::B32)),
        case(
            "1408 columns: five and a half blocks",
            wide,
            packed(BlockSize::B256),
        ),
    ]);
    all
}
