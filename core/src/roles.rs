//! What each tensor of a model is for, and the shape that a [`ModelSpec`] asks of it.

use serde::{Deserialize, Serialize};

use crate::ids::{ExpertId, LayerId};
use crate::spec::{FeedForward, ModelSpec, QkNorm};

/// A non-routed tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum DenseRole {
    /// `[vocab, hidden]`
    Embedding,
    /// `[hidden]`
    FinalNorm,
    /// `[vocab, hidden]`; absent when the embeddings are tied.
    OutputHead,
    /// A tensor of one layer.
    Layer(LayerId, LayerRole),
}

/// A non-routed tensor of a layer. Matrices are `[out, in]`, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are the field's standard terms")]
pub enum LayerRole {
    AttentionNorm,
    Query,
    QueryBias,
    QueryNorm,
    Key,
    KeyBias,
    KeyNorm,
    Value,
    ValueBias,
    Output,
    OutputBias,
    FeedForwardNorm,
    Router,
    SharedGate,
    SharedUp,
    SharedDown,
    SharedExpertGate,
    DenseGate,
    DenseUp,
    DenseDown,
}

/// One of an expert's three matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertMatrix {
    /// `[width, hidden]`
    Gate,
    /// `[width, hidden]`
    Up,
    /// `[hidden, width]`
    Down,
}

impl ExpertMatrix {
    /// All three, in the order of the expert record.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];
}

/// One matrix of one routed expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExpertRole {
    /// Layer.
    pub layer: LayerId,
    /// Expert within the layer.
    pub expert: ExpertId,
    /// Which matrix.
    pub matrix: ExpertMatrix,
}

/// A family's names for roles. Implemented once a family in `horizon-models`.
pub trait TensorNames: Send + Sync {
    /// The hub's name of a non-routed tensor.
    fn dense(&self, role: DenseRole) -> String;
    /// The hub's name of an expert's matrix.
    fn expert(&self, role: ExpertRole) -> String;
}

/// Every non-routed tensor that `spec` needs, with its shape, in a fixed order.
#[must_use]
pub fn dense_tensors(spec: &ModelSpec) -> Vec<(DenseRole, Vec<usize>)> {
    use LayerRole as L;
    let (h, a) = (spec.hidden, &spec.attention);
    let (q, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
    let mut out = vec![
        (DenseRole::Embedding, vec![spec.vocab, h]),
        (DenseRole::FinalNorm, vec![h]),
    ];
    if !spec.tied_embeddings {
        out.push((DenseRole::OutputHead, vec![spec.vocab, h]));
    }
    for (layer, l) in (0u32..).map(LayerId).zip(&spec.layers) {
        let mut add = |role, shape: &[usize]| out.push((DenseRole::Layer(layer, role), shape.to_vec()));
        add(L::AttentionNorm, &[h]);
        for (matrix, bias, norm, n) in [
            (L::Query, L::QueryBias, Some(L::QueryNorm), q),
            (L::Key, L::KeyBias, Some(L::KeyNorm), kv),
            (L::Value, L::ValueBias, None, kv),
        ] {
            add(matrix, &[n, h]);
            if a.qkv_bias {
                add(bias, &[n]);
            }
            match (norm, a.qk_norm) {
                (Some(role), QkNorm::AllHeads) => add(role, &[n]),
                (Some(role), QkNorm::PerHead) => add(role, &[a.head_dim]),
                _ => {}
            }
        }
        add(L::Output, &[h, q]);
        if a.output_bias {
            add(L::OutputBias, &[h]);
        }
        add(L::FeedForwardNorm, &[h]);
        match &l.feed_forward {
            FeedForward::Dense { width } => {
                add(L::DenseGate, &[*width, h]);
                add(L::DenseUp, &[*width, h]);
                add(L::DenseDown, &[h, *width]);
            }
            FeedForward::Moe(m) => {
                add(L::Router, &[m.experts, h]);
                if let Some(s) = &m.shared {
                    add(L::SharedGate, &[s.width, h]);
                    add(L::SharedUp, &[s.width, h]);
                    add(L::SharedDown, &[h, s.width]);
                    if s.gated {
                        add(L::SharedExpertGate, &[1, h]);
                    }
                }
            }
        }
    }
    out
}

/// Every matrix of every routed expert of `spec`: layer by layer, expert by expert, gate, up, down.
///
/// # Panics
/// When `spec` has more than [`MAX_EXPERTS`](crate::spec::MAX_EXPERTS), which validation refuses.
pub fn expert_tensors(spec: &ModelSpec) -> impl Iterator<Item = ExpertRole> + '_ {
    let experts = spec.moe().map_or(0, |m| {
        u32::try_from(m.experts).expect("validated: at most MAX_EXPERTS")
    });
    spec.moe_layers().flat_map(move |layer| {
        (0..experts).map(ExpertId).flat_map(move |expert| {
            ExpertMatrix::ALL.map(move |matrix| ExpertRole {
                layer,
                expert,
                matrix,
            })
        })
    })
}
