//! The launches of a step, in order, as data: what is run, captured into a graph, and shown to tests.

mod decode;
mod functions;
mod persistent;
mod prefill;

use horizon_core::backend::Phase;
use horizon_core::spec::ModelSpec;

use crate::args::{EmbedArgs, ExpertsArgs, HeadArgs};
use crate::driver::{DevicePtr, Launch};
use crate::shape::{Shape, TOKENS, u32_of};
use crate::tiling::TILE_ROWS;
use crate::weights::DeviceWeights;
use crate::workspace::Workspace;
pub use functions::Functions;
use functions::{Function, THREADS, linear_shared};

/// Ways of computing routed groups in decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executor {
    /// One expert after another, FP32 fused multiply-adds.
    Scalar,
    /// All experts of a token in one launch.
    Top4FusedV1,
    /// Tokens grouped by expert: index, gate and up, down and combine.
    GroupedT3,
    /// A whole token in one launch.
    PersistentV1,
}

impl Executor {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::Scalar,
        Self::Top4FusedV1,
        Self::GroupedT3,
        Self::PersistentV1,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Top4FusedV1 => "top4-fused-v1",
            Self::GroupedT3 => "grouped-t3",
            Self::PersistentV1 => "persistent-v1",
        }
    }
}

/// What a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Rows.
    pub rows: usize,
    /// Rows that ask for logits.
    pub wanted: usize,
    /// Several rows of one sequence.
    pub appended: bool,
    /// Whether attention and feed-forward outputs are kept.
    pub taps: bool,
    /// Which executor computes it.
    pub phase: Phase,
}

/// A launch with the name of its kernel.
#[derive(Clone, Debug)]
pub struct NamedLaunch {
    /// Kernel.
    pub name: &'static str,
    /// Launch.
    pub launch: Launch,
}

/// Everything that launches point to.
pub struct Places<'a> {
    /// Model.
    pub spec: &'a ModelSpec,
    /// Its sizes.
    pub shape: &'a Shape,
    /// Weights.
    pub weights: &'a DeviceWeights,
    /// Buffers.
    pub workspace: &'a Workspace,
    /// Embedding table in host memory.
    pub embedding: DevicePtr,
    /// Expert slots.
    pub arena: DevicePtr,
    /// Bytes from one slot to the next.
    pub slot_bytes: usize,
    /// `u32 [moe layers, experts]`: slot of each expert.
    pub slot_table: DevicePtr,
    /// `u64 [layers, 16]` for the clocks of the persistent kernel, or null.
    pub profile: DevicePtr,
}

/// Builds the launches of steps.
pub struct Builder<'a> {
    /// Where everything lies.
    pub places: Places<'a>,
    /// Kernels.
    pub functions: &'a Functions,
    /// Executor of routed groups.
    pub executor: Executor,
}

impl Builder<'_> {
    /// Rows into the residual stream.
    #[must_use]
    pub fn start(&self, step: &StepShape) -> Vec<NamedLaunch> {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let args = EmbedArgs {
            host_rows: p.workspace.host_rows(),
            rows: b.rows,
            chosen: b.chosen,
            table: p.embedding,
            hidden: b.hidden,
            host_which: p.workspace.host_which(),
            which: b.which,
            width: u32_of(p.shape.hidden),
            unused: 0,
        };
        let mut launch = one(
            self.functions.embed,
            [u32_of(step.rows), 1, 1],
            THREADS,
            64,
            &args,
        );
        // The step before has ended when this one starts.
        launch.launch.overlaps = false;
        vec![launch]
    }

    fn experts_args(&self, step: &StepShape, moe_row: usize) -> ExpertsArgs {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let record = p.shape.record.expect("a layer with experts has a record");
        ExpertsArgs {
            arena: p.arena,
            slots: p.slot_table.offset(moe_row * p.shape.experts() * 4),
            record_bytes: p.slot_bytes as u64,
            down: record.pair_bytes as u64,
            ids: b.ids,
            weights: b.chosen_weights,
            input: b.normed,
            inner: b.inner,
            rows: u32_of(step.rows),
            hidden: u32_of(p.shape.hidden),
            width: u32_of(p.shape.width()),
            top_k: u32_of(p.shape.top_k()),
            block: u32_of(record.encoding.block()),
            unused: 0,
        }
    }

    /// Logits and choices.
    #[must_use]
    pub fn end(&self, step: &StepShape) -> Vec<NamedLaunch> {
        if step.wanted == 0 {
            return Vec::new();
        }
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let args = HeadArgs {
            weights: p.weights.head,
            hidden: b.hidden,
            which: b.which,
            norm: p.weights.final_norm,
            logits: b.logits,
            best: p.workspace.counters.best,
            counters: p.workspace.counters.head,
            chosen: b.chosen,
            host_chosen: p.workspace.host_chosen(),
            wanted: u32_of(step.wanted),
            columns: u32_of(p.shape.hidden),
            vocab: u32_of(p.shape.vocab),
            eps: p.spec.rms_norm_eps,
        };
        let tiles = u32_of(p.shape.vocab.div_ceil(TILE_ROWS));
        let grid = [
            self.functions.head_blocks.min(tiles),
            u32_of(step.wanted.div_ceil(TOKENS)),
            1,
        ];
        let shared = linear_shared(p.shape.hidden, step.wanted.min(TOKENS));
        vec![one(self.functions.head, grid, THREADS, shared, &args)]
    }
}

fn one<A: bytemuck::Pod>(
    function: Function,
    grid: [u32; 3],
    threads: u32,
    shared: usize,
    args: &A,
) -> NamedLaunch {
    NamedLaunch {
        name: function.name,
        launch: Launch {
            kernel: function.kernel,
            grid,
            threads,
            shared: u32_of(shared),
            args: bytemuck::bytes_of(args).to_vec(),
            overlaps: true,
            cooperative: false,
        },
    }
}
