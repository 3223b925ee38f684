//! Argument structs of the kernels, field for field as the sources declare them. No implicit padding: every struct is
//! plain old data, and a test with the kernels compiled for the host compares the sizes.

use bytemuck::{Pod, Zeroable};

use crate::driver::DevicePtr;

/// Instead of a token: what the row with this index chose in the step before.
pub const CHOSEN_TOKEN: u32 = u32::MAX;
/// Splits of a row's positions in attention, and positions of a split at least.
pub const MOST_SPLITS: usize = 32;

/// `Row` of `block.cuh`: a token of a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Row {
    /// Token id, or [`CHOSEN_TOKEN`].
    pub token: u32,
    /// Position in its sequence.
    pub position: u32,
    /// Sequence.
    pub sequence: u32,
    /// Unused.
    pub flags: u32,
}

macro_rules! args {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty,)* })*) => { $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
        #[expect(missing_docs, reason = "the kernel's source describes each field")]
        pub struct $name { $(pub $field: $type,)* }
    )* };
}

mod prefill;

pub use prefill::{
    GroupedArgs, GroupedIndexArgs, PrefillAttentionArgs, PrefillLinearArgs, PrefillNormArgs, PrefillQkvArgs,
    PrefillRouterArgs,
};

args! {
    /// `layers/embed.cu`
    EmbedArgs {
        host_rows: DevicePtr, rows: DevicePtr, chosen: DevicePtr, table: DevicePtr, hidden: DevicePtr,
        host_which: DevicePtr, which: DevicePtr, width: u32, unused: u32,
    }
    /// `layers/linear.cu`, with the norm before it
    NormLinearArgs {
        weights: DevicePtr, hidden: DevicePtr, norm: DevicePtr, bias: DevicePtr, output: DevicePtr,
        rows: u32, columns: u32, outputs: u32, eps: f32,
    }
    /// `layers/linear.cu`
    LinearArgs {
        weights: DevicePtr, input: DevicePtr, output: DevicePtr,
        rows: u32, columns: u32, outputs: u32, unused: u32,
    }
    /// `layers/attend.cu`
    AttendArgs {
        rows: DevicePtr, qkv: DevicePtr, q_norm: DevicePtr, k_norm: DevicePtr, rotary: DevicePtr,
        cache: DevicePtr, partials: DevicePtr, counters: DevicePtr, output: DevicePtr,
        heads: u32, kv_heads: u32, head_dim: u32, padded: u32, context: u32, window: u32,
        norm: u32, appended: u32, eps: f32, clip: f32, scale: f32, unused: u32,
    }
    /// `layers/project.cu`
    ProjectArgs {
        weights: DevicePtr, input: DevicePtr, bias: DevicePtr, hidden: DevicePtr, tap: DevicePtr,
        norm: DevicePtr, router: DevicePtr, shares: DevicePtr, counters: DevicePtr, logits: DevicePtr,
        ids: DevicePtr, chosen: DevicePtr, gate: DevicePtr, normed: DevicePtr,
        rows: u32, columns: u32, width: u32, experts: u32, gates: u32, top_k: u32, renormalize: u32, eps: f32,
    }
    /// `layers/combine.cu`
    CombineArgs {
        outputs: DevicePtr, weights: DevicePtr, shared: DevicePtr, gate: DevicePtr, hidden: DevicePtr,
        tap: DevicePtr, width: u32, top_k: u32,
    }
    /// `layers/head.cu`
    HeadArgs {
        weights: DevicePtr, hidden: DevicePtr, which: DevicePtr, norm: DevicePtr, logits: DevicePtr,
        best: DevicePtr, counters: DevicePtr, chosen: DevicePtr, host_chosen: DevicePtr,
        wanted: u32, columns: u32, vocab: u32, eps: f32,
    }
    /// `include/experts.cuh`: where routed experts lie and what they read and write
    ExpertsArgs {
        arena: DevicePtr, slots: DevicePtr, record_bytes: u64, down: u64, ids: DevicePtr, weights: DevicePtr,
        input: DevicePtr, inner: DevicePtr,
        rows: u32, hidden: u32, width: u32, top_k: u32, block: u32, unused: u32,
    }
    /// `executors/scalar.cu`
    ScalarArgs {
        experts: ExpertsArgs, outputs: DevicePtr, rank: u32, unused: u32,
    }
    /// `executors/top4_fused_v1.cu`
    FusedArgs {
        experts: ExpertsArgs, shared_pairs: DevicePtr, shared_down: DevicePtr, gate: DevicePtr,
        shared_inner: DevicePtr, routed: DevicePtr, shared_output: DevicePtr, hidden: DevicePtr,
        tap: DevicePtr, counters: DevicePtr, shared_width: u32, unused: u32,
    }
    /// `executors/persistent_v1.cu`: a layer of its table
    PersistentLayer {
        qkv: DevicePtr, output: DevicePtr, pairs: DevicePtr, down: DevicePtr,
        attention_norm: DevicePtr, qkv_bias: DevicePtr, q_norm: DevicePtr, k_norm: DevicePtr,
        output_bias: DevicePtr, norm: DevicePtr, router: DevicePtr, slots: DevicePtr, cache: DevicePtr,
        width: u32, window: u32,
    }
    /// `executors/persistent_v1.cu`
    PersistentArgs {
        layers: DevicePtr, rows: DevicePtr, arena: DevicePtr, record_bytes: u64, down: u64,
        hidden: DevicePtr, qkv: DevicePtr, partials: DevicePtr, counters: DevicePtr, attended: DevicePtr,
        shares: DevicePtr, inner: DevicePtr, dense_inner: DevicePtr, rotary: DevicePtr, head: DevicePtr,
        final_norm: DevicePtr, logits: DevicePtr, best: DevicePtr, chosen: DevicePtr, host_chosen: DevicePtr,
        attention_tap: DevicePtr, feed_forward_tap: DevicePtr, router_logits: DevicePtr, ids: DevicePtr,
        weights: DevicePtr, profile: DevicePtr, count: u32, row: u32, width: u32, heads: u32, kv_heads: u32, head_dim: u32, padded: u32, context: u32,
        experts: u32, gates: u32, top_k: u32, expert_width: u32, block: u32, renormalize: u32, vocab: u32,
        qk_norm: u32, eps: f32, clip: f32, scale: f32, shared_width: u32, other_width: u32, unused: u32,
    }
    /// `layers/measure.cu`
    ReadArgs {
        from: DevicePtr, sum: DevicePtr, words: u64,
    }
}
