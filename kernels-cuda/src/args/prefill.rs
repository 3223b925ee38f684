//! Argument structs of the kernels for steps of many rows, and of executor `grouped-t3`.

use bytemuck::{Pod, Zeroable};

use super::ExpertsArgs;
use crate::driver::DevicePtr;

args! {
    /// `layers/prefill_norm.cu`
    PrefillNormArgs {
        hidden: DevicePtr, which: DevicePtr, norm: DevicePtr, output: DevicePtr,
        rows: u32, columns: u32, eps: f32, unused: u32,
    }
    /// `layers/prefill_norm.cu`
    PrefillQkvArgs {
        rows: DevicePtr, qkv: DevicePtr, q_norm: DevicePtr, k_norm: DevicePtr, rotary: DevicePtr,
        cache: DevicePtr, queries: DevicePtr,
        heads: u32, kv_heads: u32, head_dim: u32, padded: u32, context: u32, norm: u32, eps: f32, clip: f32,
    }
    /// `layers/prefill_linear.cu`
    PrefillLinearArgs {
        weights: DevicePtr, input: DevicePtr, which: DevicePtr, bias: DevicePtr, output: DevicePtr,
        hidden: DevicePtr,
        tokens: u32, columns: u32, outputs: u32, unused: u32,
    }
    /// `layers/prefill_attention.cu`
    PrefillAttentionArgs {
        rows: DevicePtr, queries: DevicePtr, cache: DevicePtr, output: DevicePtr,
        tokens: u32, heads: u32, kv_heads: u32, head_dim: u32, padded: u32, context: u32, window: u32, scale: f32,
    }
    /// `layers/prefill_router.cu`
    PrefillRouterArgs {
        hidden: DevicePtr, norm: DevicePtr, router: DevicePtr, logits: DevicePtr, ids: DevicePtr,
        chosen: DevicePtr, gate: DevicePtr, normed: DevicePtr,
        rows: u32, width: u32, experts: u32, gates: u32, top_k: u32, renormalize: u32, eps: f32, unused: u32,
    }
    /// `executors/grouped_t3.cu`, first launch
    GroupedIndexArgs {
        ids: DevicePtr, order: DevicePtr, work: DevicePtr, count: DevicePtr,
        rows: u32, top_k: u32, experts: u32, most: u32,
    }
    /// `executors/grouped_t3.cu`, second and third launch
    GroupedArgs {
        experts: ExpertsArgs, order: DevicePtr, work: DevicePtr, count: DevicePtr, outputs: DevicePtr,
        shared: DevicePtr, gate: DevicePtr, hidden: DevicePtr, tap: DevicePtr, counters: DevicePtr,
    }
}
