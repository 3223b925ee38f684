//! The numbers of a model that kernels are launched with.

use horizon_core::backend::{BackendError, Regime};
use horizon_core::dense::DenseFormat;
use horizon_core::record::{ExpertEncoding, RecordLayout};
use horizon_core::spec::{FeedForward, ModelSpec, MoeSpec, QkNorm};

use crate::tiling::{RecordTiles, TILE_ROWS, TileEncoding};

/// Name of the backend.
pub const NAME: &str = "cuda";
/// Tokens that one product of a decode kernel takes.
pub const TOKENS: usize = 8;
/// Widest head that attention takes.
const MOST_HEAD_DIM: usize = 256;

/// Sizes that are fixed when a model is opened. All fit `u32`: `MAX_DIMENSION` bounds them.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Residual stream.
    pub hidden: usize,
    /// Tokens.
    pub vocab: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of a head in the KV cache.
    pub padded: usize,
    /// Layers.
    pub layers: usize,
    /// The routed experts, if any.
    pub moe: Option<MoeSpec>,
    /// Their record, if any.
    pub record: Option<RecordTiles>,
    /// Widest dense feed-forward or shared expert; 0: none.
    pub dense_width: usize,
    /// Width of the shared expert; 0: none.
    pub shared_width: usize,
    /// Width of dense feed-forwards; 0: none.
    pub mlp_width: usize,
    /// Form of the non-routed matrices.
    pub dense: TileEncoding,
    /// What the model is opened for.
    pub regime: Regime,
}

impl Shape {
    /// The shape of `spec` with experts in `encoding`.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] with the limit that is exceeded.
    pub fn new(
        spec: &ModelSpec,
        encoding: ExpertEncoding,
        dense: DenseFormat,
        regime: &Regime,
    ) -> Result<Self, BackendError> {
        let a = &spec.attention;
        if a.head_dim > MOST_HEAD_DIM {
            return Err(BackendError::Unsupported {
                backend: NAME,
                reason: format!("head_dim {} is above {MOST_HEAD_DIM}", a.head_dim),
            });
        }
        if regime.activations != horizon_core::backend::Activations::F16 {
            return Err(BackendError::Unsupported {
                backend: NAME,
                reason: "activations are f16 on this backend; --activations f32 needs --backend cpu".into(),
            });
        }
        let (mut shared_width, mut mlp_width) = (0, 0);
        for layer in &spec.layers {
            match &layer.feed_forward {
                FeedForward::Dense { width } if mlp_width != 0 && mlp_width != *width => {
                    return Err(BackendError::Unsupported {
                        backend: NAME,
                        reason: format!("dense layers of width {mlp_width} and of width {width}"),
                    });
                }
                FeedForward::Dense { width } => mlp_width = *width,
                FeedForward::Moe(m) => shared_width = m.shared.as_ref().map_or(0, |s| s.width),
            }
        }
        Ok(Self {
            hidden: spec.hidden,
            vocab: spec.vocab,
            heads: a.heads,
            kv_heads: a.kv_heads,
            head_dim: a.head_dim,
            padded: a.head_dim.next_multiple_of(8),
            layers: spec.layers.len(),
            moe: spec.moe().cloned(),
            record: RecordLayout::new(spec, encoding).map(|l| RecordTiles::new(&l)),
            dense_width: shared_width.max(mlp_width),
            shared_width,
            mlp_width,
            dense: match dense {
                DenseFormat::F16 => TileEncoding::F16,
                DenseFormat::Q8 => TileEncoding::Q8,
            },
            regime: *regime,
        })
    }

    /// Rows of the joined query, key and value projection.
    #[must_use]
    pub fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Width of the attended heads.
    #[must_use]
    pub fn attended(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Tiles of the residual stream.
    #[must_use]
    pub fn hidden_tiles(&self) -> usize {
        self.hidden.div_ceil(TILE_ROWS)
    }

    /// Routed experts of a layer; 0: none.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.moe.as_ref().map_or(0, |m| m.experts)
    }

    /// Experts a token uses; 0: none.
    #[must_use]
    pub fn top_k(&self) -> usize {
        self.moe.as_ref().map_or(0, |m| m.top_k)
    }

    /// Width of a routed expert; 0: none.
    #[must_use]
    pub fn width(&self) -> usize {
        self.moe.as_ref().map_or(0, |m| m.width)
    }

    /// Columns of the router's products: experts, and the shared expert's gate.
    #[must_use]
    pub fn router_columns(&self) -> usize {
        let gated = self
            .moe
            .as_ref()
            .and_then(|m| m.shared.as_ref())
            .is_some_and(|s| s.gated);
        self.experts() + usize::from(gated)
    }

    /// Most rows of a decode step.
    #[must_use]
    pub fn few_rows(&self) -> usize {
        self.regime.max_rows.min(self.regime.sequences.max(TOKENS))
    }

    /// Words of counters of a layer's fused executor.
    #[must_use]
    pub fn fused_counters(&self) -> usize {
        2 + self.few_rows() * (2 + self.hidden_tiles())
    }

    /// Bytes of the KV cache of one layer.
    #[must_use]
    pub fn layer_cache_bytes(&self) -> usize {
        self.regime.sequences * self.kv_heads * 2 * self.regime.context * self.padded * 2
    }
}

/// Number of `QkNorm` in `attend.cu`.
#[must_use]
pub fn norm_code(norm: QkNorm) -> u32 {
    match norm {
        QkNorm::None => 0,
        QkNorm::AllHeads => 1,
        QkNorm::PerHead => 2,
    }
}

/// A size as kernels take it.
///
/// # Panics
/// When it does not fit, which validation of the specification excludes.
#[must_use]
pub fn u32_of(size: usize) -> u32 {
    u32::try_from(size).expect("sizes are bounded by MAX_DIMENSION")
}

/// Bytes of one activation row in shared memory, `activation_stride` of `tile.cuh`.
#[must_use]
pub fn activation_stride(columns: usize) -> usize {
    columns.div_ceil(64) * 128 + 64
}
