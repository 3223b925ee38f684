//! Names of the stages of a step, and taps: copies of what a stage produced.

use std::fmt;

use crate::ids::LayerId;

/// A point in the forward pass where two backends can be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Output of the attention block, after the output projection, before the residual add. `[rows, hidden]`
    AttentionOutput(LayerId),
    /// Router logits. `[rows, E]`
    RouterLogits(LayerId),
    /// Chosen experts by falling probability. `[rows, k]`, integers.
    TopkIndex(LayerId),
    /// Weight of each chosen expert's output. `[rows, k]`
    TopkWeight(LayerId),
    /// Output of the feed-forward block, before the residual add. `[rows, hidden]`
    FeedForwardOutput(LayerId),
    /// Residual stream after the layer. `[rows, hidden]`
    Hidden(LayerId),
}

impl fmt::Display for Stage {
    /// The tensor name used in golden files and by `horizon eval logits --taps`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, layer) = match self {
            Self::AttentionOutput(l) => ("attn_out", l),
            Self::RouterLogits(l) => ("router_logits", l),
            Self::TopkIndex(l) => ("topk_index", l),
            Self::TopkWeight(l) => ("topk_weight", l),
            Self::FeedForwardOutput(l) => ("mlp_out", l),
            Self::Hidden(l) => ("hidden", l),
        };
        write!(f, "{name}.{}", layer.0)
    }
}

/// What a stage produced for the rows of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Tap {
    /// Where it was taken.
    pub stage: Stage,
    /// Values a row.
    pub width: usize,
    /// Row-major values.
    pub data: TapData,
}

/// The values of a [`Tap`].
#[derive(Clone, Debug, PartialEq)]
pub enum TapData {
    /// Real values.
    F32(Vec<f32>),
    /// Expert ids.
    I32(Vec<i32>),
}
