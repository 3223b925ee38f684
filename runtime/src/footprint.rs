//! What a model weighs: bytes a token, and what a GPU of each capacity would need.

use horizon_core::backend::Activations;
use horizon_core::dense::{DenseFormat, HeldTensor, held_tensors};
use horizon_core::record::RecordLayout;
use horizon_core::roles::{DenseRole, dense_tensors};
use horizon_core::spec::ModelSpec;
use serde::Serialize;

/// Bytes of an FP16 value.
const F16: u64 = 2;

/// Bytes that one decode step reads, the floor of its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BytesPerToken {
    /// Attention, norms, router, shared expert, dense layers, final norm; one row of the embedding.
    pub dense: u64,
    /// The output head.
    pub head: u64,
    /// The k routed experts of every layer, without padding.
    pub routed: u64,
    /// Keys and values before the position.
    pub kv: u64,
    /// All of it.
    pub total: u64,
}

impl BytesPerToken {
    /// Bytes that the step at `position` reads.
    #[must_use]
    pub fn at(
        spec: &ModelSpec,
        layout: Option<&RecordLayout>,
        format: DenseFormat,
        activations: Activations,
        position: usize,
    ) -> Self {
        let (mut dense, mut head) = (spec.hidden as u64 * F16, 0);
        let tensors = held_tensors(spec, format);
        let head_role = head_role(&tensors);
        for tensor in &tensors {
            let bytes = tensor.payload_bytes() as u64;
            match tensor.role {
                role if role == head_role => head = bytes,
                // Of the table one row.
                DenseRole::Embedding | DenseRole::OutputHead => {}
                DenseRole::FinalNorm | DenseRole::Layer(..) => dense += bytes,
            }
        }
        let routed = match (layout, spec.moe()) {
            (Some(l), Some(m)) => {
                l.payload_bytes() as u64 * m.top_k as u64 * spec.moe_layers().count() as u64
            }
            _ => 0,
        };
        let kv = (0..spec.layers.len())
            .map(|l| {
                let seen = spec.layers[l].window.map_or(position, |w| position.min(w - 1));
                seen as u64 * kv_bytes_per_position(spec, activations) / spec.layers.len() as u64
            })
            .sum();
        Self {
            dense,
            head,
            routed,
            kv,
            total: dense + head + routed + kv,
        }
    }
}

/// Bytes of the keys and values of one position, all layers.
#[must_use]
pub fn kv_bytes_per_position(spec: &ModelSpec, activations: Activations) -> u64 {
    let value = match activations {
        Activations::F16 => 2,
        Activations::F32 => 4,
    };
    (spec.layers.len() * 2 * spec.attention.kv_heads * spec.attention.head_dim * value) as u64
}

/// GPU memory that a capacity would need. Workspaces are not in it: a GPU backend plans them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GpuMemory {
    /// c: resident experts a layer.
    pub capacity: usize,
    /// Non-routed weights without the embedding table (which stays on the host unless it is the output head).
    pub dense: u64,
    /// FP16 KV cache of the context.
    pub kv: u64,
    /// c slots a layer.
    pub slots: u64,
    /// k spare slots, shared by the layers.
    pub spares: u64,
    /// All of it.
    pub total: u64,
}

/// What every capacity from k to E would need in GPU memory with an FP16 KV cache of `context` positions.
#[must_use]
pub fn gpu_memory(
    spec: &ModelSpec,
    layout: &RecordLayout,
    format: DenseFormat,
    context: usize,
) -> Vec<GpuMemory> {
    let Some(moe) = spec.moe() else { return Vec::new() };
    let tensors = held_tensors(spec, format);
    let head = head_role(&tensors);
    let dense = tensors
        .iter()
        .filter(|t| t.role != DenseRole::Embedding || t.role == head)
        .map(|t| t.payload_bytes() as u64)
        .sum::<u64>();
    let kv = kv_bytes_per_position(spec, Activations::F16) * context as u64;
    let record = layout.bytes as u64;
    let spares = record * moe.top_k as u64;
    (moe.top_k..=moe.experts)
        .map(|capacity| {
            let slots = record * (capacity * spec.moe_layers().count()) as u64;
            GpuMemory {
                capacity,
                dense,
                kv,
                slots,
                spares,
                total: dense + kv + slots + spares,
            }
        })
        .collect()
}

/// Where the output head is: a tensor of its own, or the embedding table.
fn head_role(tensors: &[HeldTensor]) -> DenseRole {
    if tensors.iter().any(|t| t.role == DenseRole::OutputHead) {
        DenseRole::OutputHead
    } else {
        DenseRole::Embedding
    }
}

/// Number of values of the model: all, and those that one token passes.
#[must_use]
pub fn parameters(spec: &ModelSpec) -> (u64, u64) {
    let dense: u64 = dense_tensors(spec).iter().map(|(_, s)| elements(s) as u64).sum();
    let expert = spec.moe().map_or(0, |m| 3 * m.width as u64 * spec.hidden as u64);
    let active = spec.moe().map_or(0, |m| m.top_k) as u64 * spec.moe_layers().count() as u64;
    (dense + expert * expert_count(spec), dense + expert * active)
}

fn expert_count(spec: &ModelSpec) -> u64 {
    spec.moe().map_or(0, |m| m.experts) as u64 * spec.moe_layers().count() as u64
}

fn elements(shape: &[usize]) -> usize {
    shape.iter().product()
}

#[cfg(test)]
mod tests {
    use horizon_core::qpacked::BlockSize;
    use horizon_core::record::ExpertEncoding;
    use horizon_core::spec::{AttentionSpec, FeedForward, LayerSpec, MoeSpec, QkNorm};

    use super::*;

    /// OLMoE-1B-7B.
    fn olmoe() -> ModelSpec {
        let moe = MoeSpec {
            experts: 64,
            top_k: 8,
            width: 1024,
            renormalize: false,
            shared: None,
        };
        ModelSpec {
            family: "olmoe".into(),
            vocab: 50304,
            hidden: 2048,
            context: 4096,
            rms_norm_eps: 1e-5,
            tied_embeddings: false,
            attention: AttentionSpec {
                heads: 16,
                kv_heads: 16,
                head_dim: 128,
                qk_norm: QkNorm::AllHeads,
                qkv_bias: false,
                output_bias: false,
                clip_qkv: None,
                rope_theta: 1e4,
            },
            layers: vec![
                LayerSpec {
                    window: None,
                    feed_forward: FeedForward::Moe(moe)
                };
                16
            ],
        }
    }

    fn layout() -> RecordLayout {
        RecordLayout::new(
            &olmoe(),
            ExpertEncoding::Qpacked {
                block: BlockSize::B256,
            },
        )
        .expect("has experts")
    }

    #[test]
    fn olmoe_reads_the_bytes_a_token_that_its_shapes_say() {
        let b = BytesPerToken::at(&olmoe(), Some(&layout()), DenseFormat::F16, Activations::F16, 0);
        let attention = 4 * 2048 * 2048 * 16 * 2u64;
        let router = 64 * 2048 * 16 * 2u64;
        let norms = (4 * 16 + 1) * 2048 * 2u64;
        assert_eq!(b.dense, attention + router + norms + 2048 * 2);
        assert_eq!(b.head, 50304 * 2048 * 2);
        assert_eq!(b.routed, 16 * 8 * 3 * (2048 * 1024 / 2 + 2048 * 1024 / 256 * 2));
        assert_eq!(b.kv, 0);
        // 1.16 GB: 537 MB attention, 409 MB experts, 206 MB head, 4 MB router.
        assert!((1_150_000_000..1_165_000_000).contains(&b.total), "{b:?}");
        let later = BytesPerToken::at(
            &olmoe(),
            Some(&layout()),
            DenseFormat::F16,
            Activations::F16,
            1000,
        );
        assert_eq!(later.kv, 1000 * 16 * 2 * 2048 * 2);
        assert_eq!(
            BytesPerToken::at(
                &olmoe(),
                Some(&layout()),
                DenseFormat::F16,
                Activations::F32,
                1000
            )
            .kv,
            2 * later.kv
        );
    }

    #[test]
    fn a_window_bounds_the_keys_read() {
        let mut spec = olmoe();
        for layer in &mut spec.layers[..8] {
            layer.window = Some(101);
        }
        let kv = BytesPerToken::at(&spec, None, DenseFormat::F16, Activations::F16, 1000).kv;
        assert_eq!(kv, (8 * 1000 + 8 * 100) * 2 * 2048 * 2);
    }

    #[test]
    fn a_tied_embedding_counts_as_the_head() {
        let tied = ModelSpec {
            tied_embeddings: true,
            ..olmoe()
        };
        let (a, b) = (olmoe(), tied);
        let at = |s: &ModelSpec| BytesPerToken::at(s, Some(&layout()), DenseFormat::F16, Activations::F16, 0);
        assert_eq!(at(&a), at(&b));
        assert_eq!(
            gpu_memory(&a, &layout(), DenseFormat::F16, 4096),
            gpu_memory(&b, &layout(), DenseFormat::F16, 4096)
        );
    }

    #[test]
    fn q8_takes_a_sixteenth_over_half_of_what_it_converts() {
        let at = |s: &ModelSpec| BytesPerToken::at(s, Some(&layout()), DenseFormat::Q8, Activations::F16, 0);
        let b = at(&olmoe());
        let q8 = |values: u64| values + values / 32 * 2;
        let rest = 64 * 2048 * 16 * 2 + (4 * 16 + 1) * 2048 * 2 + 2048 * 2;
        assert_eq!(
            (b.dense, b.head),
            (q8(4 * 2048 * 2048 * 16) + rest, q8(50304 * 2048))
        );
        // Tied: the same reads, the table stays on the host.
        let tied = ModelSpec {
            tied_embeddings: true,
            ..olmoe()
        };
        assert_eq!(at(&tied), b);
        let memory = |s: &ModelSpec| gpu_memory(s, &layout(), DenseFormat::Q8, 4096);
        assert_eq!(memory(&tied), memory(&olmoe()));
        // All of it is read, but for the row of the table.
        assert_eq!(memory(&olmoe())[0].dense + 2048 * 2, b.dense + b.head);
    }

    #[test]
    fn capacities_run_from_k_to_e_and_grow_by_a_slot_a_layer() {
        let rows = gpu_memory(&olmoe(), &layout(), DenseFormat::F16, 4096);
        assert_eq!((rows.len(), rows[0].capacity, rows[56].capacity), (57, 8, 64));
        let record = layout().bytes as u64;
        assert!(rows.windows(2).all(|w| w[1].total - w[0].total == 16 * record));
        assert_eq!((rows[0].slots, rows[0].spares), (8 * 16 * record, 8 * record));
        assert_eq!(rows[0].kv, 4096 * 16 * 2 * 2048 * 2);
        assert!(gpu_memory(&olmoe(), &layout(), DenseFormat::F16, 0)[0].kv == 0);
    }

    #[test]
    fn parameters_are_those_of_the_name() {
        let (all, active) = parameters(&olmoe());
        assert!(
            (6_900_000_000..6_950_000_000).contains(&all) && (1_270_000_000..1_300_000_000).contains(&active)
        );
    }
}
