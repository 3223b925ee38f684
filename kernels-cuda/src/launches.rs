//! The launches of a step, in order, as data: what is run, captured into a graph, and shown to tests.

use std::ops::Range;

use horizon_core::backend::Phase;
use horizon_core::spec::{FeedForward, LayerSpec, ModelSpec};

use crate::args::{
    AttendArgs, CombineArgs, EmbedArgs, ExpertsArgs, FusedArgs, HeadArgs, LinearArgs, MOST_SPLITS,
    NormLinearArgs, PersistentArgs, PersistentLayer, ProjectArgs, ScalarArgs,
};
use crate::driver::{DevicePtr, DriverError, Kernel, Launch, SharedDriver};
use crate::shape::{Shape, TOKENS, activation_stride, norm_code, u32_of};
use crate::tiling::{TILE_ROWS, TileEncoding};
use crate::weights::{DeviceWeights, LayerWeights};
use crate::workspace::Workspace;

/// Ways of computing routed groups in decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executor {
    /// One expert after another, FP32 fused multiply-adds.
    Scalar,
    /// All experts of a token in one launch.
    Top4FusedV1,
    /// A whole token in one launch.
    PersistentV1,
}

impl Executor {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Top4FusedV1, Self::PersistentV1];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Top4FusedV1 => "top4-fused-v1",
            Self::PersistentV1 => "persistent-v1",
        }
    }
}

/// A kernel with the name it is known by.
#[derive(Clone, Copy, Debug)]
struct Function {
    name: &'static str,
    kernel: Kernel,
}

/// The kernels of a model, loaded.
pub struct Functions {
    embed: Function,
    norm_linear: Function,
    append: Function,
    attend: Function,
    project: Function,
    pair_linear: Function,
    linear: Function,
    combine: Function,
    head: Function,
    gate_up: Function,
    down: Function,
    fused: Function,
    persistent: Function,
    /// Blocks of the head's grid.
    head_blocks: u32,
    multiprocessors: u32,
}

/// Threads of a block of most kernels.
const THREADS: u32 = 256;
const ATTEND_THREADS: u32 = 128;

impl Functions {
    /// Loads every kernel that steps of `shape` may launch, and allows the shared memory that it asks for.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn load(driver: &SharedDriver, shape: &Shape) -> Result<Self, DriverError> {
        let get = |name: &'static str| {
            Ok::<_, DriverError>(Function {
                name,
                kernel: driver.kernel(name)?,
            })
        };
        let q8 = shape.dense == TileEncoding::Q8;
        let of = |f16, q8_name| get(if q8 { q8_name } else { f16 });
        let packed = matches!(shape.record.map(|r| r.encoding), Some(TileEncoding::Int4 { .. }));
        let attend = match shape.padded {
            0..=32 => "attend_32",
            33..=64 => "attend_64",
            65..=128 => "attend_128",
            _ => "attend_256",
        };
        let fused = match (packed, q8) {
            (true, false) => "top4_fused_v1_int4_f16",
            (true, true) => "top4_fused_v1_int4_q8",
            (false, false) => "top4_fused_v1_f16_f16",
            (false, true) => "top4_fused_v1_f16_q8",
        };
        let persistent = match (packed, q8) {
            (true, false) => "persistent_v1_int4_f16",
            (true, true) => "persistent_v1_int4_q8",
            (false, false) => "persistent_v1_f16_f16",
            (false, true) => "persistent_v1_f16_q8",
        };
        let mut functions = Self {
            embed: get("embed")?,
            norm_linear: of("norm_linear_f16", "norm_linear_q8")?,
            append: get("append_kv")?,
            attend: get(attend)?,
            project: of("project_f16", "project_q8")?,
            pair_linear: of("pair_linear_f16", "pair_linear_q8")?,
            linear: of("linear_f16", "linear_q8")?,
            combine: get("combine")?,
            head: of("head_f16", "head_q8")?,
            gate_up: get(if packed {
                "scalar_gate_up_int4"
            } else {
                "scalar_gate_up_f16"
            })?,
            down: get(if packed {
                "scalar_down_int4"
            } else {
                "scalar_down_f16"
            })?,
            fused: get(fused)?,
            persistent: get(persistent)?,
            head_blocks: 0,
            multiprocessors: 1,
        };
        for (function, shared) in [
            (functions.norm_linear, linear_shared(shape.hidden, TOKENS)),
            (functions.append, append_shared(shape)),
            (functions.attend, attend_shared(shape)),
            (functions.project, project_shared(shape, TOKENS)),
            (functions.pair_linear, linear_shared(shape.hidden, TOKENS)),
            (functions.linear, linear_shared(shape.dense_width, TOKENS)),
            (functions.head, linear_shared(shape.hidden, TOKENS)),
            (functions.gate_up, activation_stride(shape.hidden) + 256),
            (functions.down, activation_stride(shape.width()) + 256),
            (functions.fused, fused_shared(shape)),
            (
                functions.persistent,
                persistent_shared(shape, driver.info().multiprocessors as usize),
            ),
        ] {
            driver.allow_shared(function.kernel, u32_of(shared))?;
        }
        let shared = u32_of(linear_shared(shape.hidden, 1));
        let resident = driver.resident_blocks(functions.head.kernel, THREADS, shared)?;
        functions.multiprocessors = driver.info().multiprocessors;
        functions.head_blocks = (resident * driver.info().multiprocessors).max(1);
        Ok(functions)
    }
}

/// Shared memory of the linear kernels: activations, sums of eight warps, a float a warp, a word.
fn linear_shared(columns: usize, tokens: usize) -> usize {
    tokens * activation_stride(columns) + 8 * 128 * 4 + 64
}

/// Shared memory of attention in `warps` warps: query, key, value; two floats a warp, four words; sums of each warp.
fn attend_shared_of(shape: &Shape, warps: usize) -> usize {
    (3 * shape.padded + 2 * warps + 4 + warps * (shape.padded + 2)) * 4
}

fn append_shared(shape: &Shape) -> usize {
    (3 * shape.padded + 8) * 4
}

fn attend_shared(shape: &Shape) -> usize {
    attend_shared_of(shape, ATTEND_THREADS as usize / 32)
}

fn project_shared(shape: &Shape, tokens: usize) -> usize {
    let product = tokens * activation_stride(shape.attended()) + (8 * 128 + 256) * 4 + 64;
    let wide = shape.router_columns() + 1;
    product.max((9 * wide + shape.experts() + 8) * 4)
}

fn fused_shared(shape: &Shape) -> usize {
    let routed = shape.top_k().min(8) * activation_stride(shape.width());
    let shared = activation_stride(shape.dense_width);
    activation_stride(shape.hidden).max(routed.max(shared)) + (8 * 16) * 4 + 64
}

/// Warps of the persistent kernel, and slots of each warp's ring.
const PERSISTENT_WARPS: usize = 16;
const PERSISTENT_SLOTS: usize = 5;
/// Bytes of `Fixed` of the persistent kernel.
const PERSISTENT_FIXED: usize = 3 * 256 + 16 + PERSISTENT_WARPS * 9 * 32;

/// Shared memory of the persistent kernel: rings, layers, what is fixed, sums, and room for the part that needs most.
fn persistent_shared(shape: &Shape, blocks: usize) -> usize {
    let rings = PERSISTENT_WARPS * PERSISTENT_SLOTS * (2048 + 256);
    let fixed = shape.layers * size_of::<PersistentLayer>() + PERSISTENT_FIXED + 8 * PERSISTENT_WARPS * 64;
    let attend = attend_shared_of(shape, PERSISTENT_WARPS);
    let project = activation_stride(shape.attended()) + 8 * 16 * 2 * 4;
    let wide = shape.router_columns() + 1;
    let route = activation_stride(shape.hidden) + ((PERSISTENT_WARPS + 1) * wide + 2 * shape.experts()) * 4;
    let down = shape.top_k() * activation_stride(shape.width())
        + activation_stride(shape.dense_width)
        + shape.hidden_tiles().div_ceil(blocks) * 64;
    rings + fixed + attend.max(project).max(route).max(down)
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

    /// Everything of one layer. `moe_row` counts layers with routed experts.
    #[must_use]
    pub fn layer(&self, step: &StepShape, layer: usize, moe_row: usize) -> Vec<NamedLaunch> {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let (shape, spec) = (p.shape, &p.spec.layers[layer]);
        let w = &p.weights.layers[layer];
        let groups = u32_of(step.rows.div_ceil(TOKENS));
        let tokens = step.rows.min(TOKENS);
        let qkv = NormLinearArgs {
            weights: w.qkv,
            hidden: b.hidden,
            norm: w.attention_norm,
            bias: w.qkv_bias,
            output: b.qkv,
            rows: u32_of(step.rows),
            columns: u32_of(shape.hidden),
            outputs: u32_of(shape.qkv()),
            eps: p.spec.rms_norm_eps,
        };
        let grid = [u32_of(shape.qkv().div_ceil(TILE_ROWS)), groups, 1];
        let shared = linear_shared(shape.hidden, tokens);
        let mut out = vec![one(self.functions.norm_linear, grid, THREADS, shared, &qkv)];
        out.extend(self.attention(step, layer, spec, w));
        let moe = spec.moe();
        let project = ProjectArgs {
            weights: w.output,
            input: b.attended,
            bias: w.output_bias,
            hidden: b.hidden,
            tap: if step.taps { b.attention_tap } else { DevicePtr(0) },
            norm: w.feed_forward_norm,
            router: w.router,
            shares: b.shares,
            counters: p.workspace.counters.project,
            logits: b.router_logits,
            ids: b.ids,
            chosen: b.chosen_weights,
            gate: b.gate,
            normed: b.normed,
            rows: u32_of(step.rows),
            columns: u32_of(shape.attended()),
            width: u32_of(shape.hidden),
            experts: u32_of(moe.map_or(0, |m| m.experts)),
            gates: u32::from(moe.and_then(|m| m.shared.as_ref()).is_some_and(|s| s.gated)),
            top_k: u32_of(moe.map_or(0, |m| m.top_k)),
            renormalize: u32::from(moe.is_some_and(|m| m.renormalize)),
            eps: p.spec.rms_norm_eps,
        };
        let grid = [u32_of(shape.hidden_tiles()), groups, 1];
        out.push(one(
            self.functions.project,
            grid,
            THREADS,
            project_shared(shape, tokens),
            &project,
        ));
        match &spec.feed_forward {
            FeedForward::Dense { .. } => {
                out.extend(self.dense_mlp(step, w));
                out.push(self.combine(step, false, true, false));
            }
            FeedForward::Moe(m) => {
                let gated = m.shared.as_ref().is_some_and(|s| s.gated);
                let experts = self.experts_args(step, moe_row);
                match self.executor {
                    Executor::Scalar => {
                        if m.shared.is_some() {
                            out.extend(self.dense_mlp(step, w));
                        }
                        out.extend(self.scalar(step, &experts, m.top_k));
                        out.push(self.combine(step, true, m.shared.is_some(), gated));
                    }
                    // The persistent kernel is no launch of a layer: steps that want one are computed by this.
                    Executor::Top4FusedV1 | Executor::PersistentV1 => {
                        out.push(self.fused(step, layer, &experts, w, gated));
                    }
                }
            }
        }
        out
    }

    fn attention(
        &self,
        step: &StepShape,
        layer: usize,
        spec: &LayerSpec,
        w: &LayerWeights,
    ) -> Vec<NamedLaunch> {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let (shape, a) = (p.shape, &p.spec.attention);
        #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
        let scale = 1.0 / (a.head_dim as f32).sqrt();
        let args = AttendArgs {
            rows: b.rows,
            qkv: b.qkv,
            q_norm: w.q_norm,
            k_norm: w.k_norm,
            rotary: b.rotary,
            cache: b.cache.offset(layer * shape.layer_cache_bytes()),
            partials: b.partials,
            counters: p.workspace.counters.attend,
            output: b.attended,
            heads: u32_of(a.heads),
            kv_heads: u32_of(a.kv_heads),
            head_dim: u32_of(a.head_dim),
            padded: u32_of(shape.padded),
            context: u32_of(shape.regime.context),
            window: u32_of(spec.window.map_or(0, |w| w.min(shape.regime.context))),
            norm: norm_code(a.qk_norm),
            appended: u32::from(step.appended),
            eps: p.spec.rms_norm_eps,
            clip: a.clip_qkv.unwrap_or(0.0),
            scale,
            unused: 0,
        };
        let (rows, heads) = (u32_of(step.rows), u32_of(a.heads));
        let mut out = Vec::with_capacity(2);
        if step.appended {
            let grid = [rows, u32_of(a.kv_heads), 1];
            out.push(one(
                self.functions.append,
                grid,
                ATTEND_THREADS,
                append_shared(shape),
                &args,
            ));
        }
        let grid = [heads, u32_of(MOST_SPLITS), rows];
        out.push(one(
            self.functions.attend,
            grid,
            ATTEND_THREADS,
            attend_shared(shape),
            &args,
        ));
        out
    }

    /// Gate, up and down of the shared expert or of a dense feed-forward, into `dense_output`.
    fn dense_mlp(&self, step: &StepShape, w: &LayerWeights) -> [NamedLaunch; 2] {
        let (shape, b) = (self.places.shape, &self.places.workspace.buffers);
        let groups = u32_of(step.rows.div_ceil(TOKENS));
        let tokens = step.rows.min(TOKENS);
        let pairs = LinearArgs {
            weights: w.pairs,
            input: b.normed,
            output: b.dense_inner,
            rows: u32_of(step.rows),
            columns: u32_of(shape.hidden),
            outputs: u32_of(w.width),
            unused: 0,
        };
        let down = LinearArgs {
            weights: w.down,
            input: b.dense_inner,
            output: b.dense_output,
            columns: u32_of(w.width),
            outputs: u32_of(shape.hidden),
            ..pairs
        };
        let tiles = u32_of(shape.hidden_tiles());
        [
            one(
                self.functions.pair_linear,
                [u32_of(w.width / 8), groups, 1],
                THREADS,
                linear_shared(shape.hidden, tokens),
                &pairs,
            ),
            one(
                self.functions.linear,
                [tiles, groups, 1],
                THREADS,
                linear_shared(w.width, tokens),
                &down,
            ),
        ]
    }

    fn combine(&self, step: &StepShape, routed: bool, dense: bool, gated: bool) -> NamedLaunch {
        let (shape, b) = (self.places.shape, &self.places.workspace.buffers);
        let when = |condition, place| if condition { place } else { DevicePtr(0) };
        let args = CombineArgs {
            outputs: when(routed, b.outputs),
            weights: b.chosen_weights,
            shared: when(dense, b.dense_output),
            gate: when(gated, b.gate),
            hidden: b.hidden,
            tap: when(step.taps, b.feed_forward_tap),
            width: u32_of(shape.hidden),
            top_k: u32_of(shape.top_k()),
        };
        let grid = [u32_of(shape.hidden.div_ceil(256)), u32_of(step.rows), 1];
        one(self.functions.combine, grid, THREADS, 0, &args)
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

    fn scalar(&self, step: &StepShape, experts: &ExpertsArgs, top_k: usize) -> Vec<NamedLaunch> {
        let (shape, b) = (self.places.shape, &self.places.workspace.buffers);
        let rows = u32_of(step.rows);
        (0..top_k)
            .flat_map(|rank| {
                let args = ScalarArgs {
                    experts: *experts,
                    outputs: b.outputs,
                    rank: u32_of(rank),
                    unused: 0,
                };
                let (pairs, tiles) = (u32_of(shape.width() / 8), u32_of(shape.hidden_tiles()));
                [
                    one(
                        self.functions.gate_up,
                        [pairs, rows, 1],
                        ATTEND_THREADS,
                        activation_stride(shape.hidden) + 256,
                        &args,
                    ),
                    one(
                        self.functions.down,
                        [tiles, rows, 1],
                        ATTEND_THREADS,
                        activation_stride(shape.width()) + 256,
                        &args,
                    ),
                ]
            })
            .collect()
    }

    fn fused(
        &self,
        step: &StepShape,
        layer: usize,
        experts: &ExpertsArgs,
        w: &LayerWeights,
        gated: bool,
    ) -> NamedLaunch {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let shape = p.shape;
        let args = FusedArgs {
            experts: *experts,
            shared_pairs: w.pairs,
            shared_down: w.down,
            gate: if gated { b.gate } else { DevicePtr(0) },
            shared_inner: b.dense_inner,
            routed: b.routed,
            shared_output: b.dense_output,
            hidden: b.hidden,
            tap: if step.taps {
                b.feed_forward_tap
            } else {
                DevicePtr(0)
            },
            counters: p
                .workspace
                .counters
                .fused
                .offset(layer * shape.fused_counters() * 4),
            shared_width: u32_of(w.width),
            dense_encoding: 0,
        };
        let pairs = shape.top_k() * (shape.width() / 8).div_ceil(4) + w.width / 8;
        let downs = shape.hidden_tiles() * if w.width > 0 { 2 } else { 1 };
        let grid = [u32_of(step.rows * (pairs + downs)), 1, 1];
        one(self.functions.fused, grid, THREADS, fused_shared(shape), &args)
    }

    /// The table of layers that the persistent kernel reads.
    #[must_use]
    pub fn layer_table(&self) -> Vec<PersistentLayer> {
        let p = &self.places;
        let mut moe_row = 0;
        p.weights
            .layers
            .iter()
            .zip(&p.spec.layers)
            .enumerate()
            .map(|(i, (w, l))| {
                let slots = l.moe().map(|m| {
                    moe_row += 1;
                    p.slot_table.offset((moe_row - 1) * m.experts * 4)
                });
                PersistentLayer {
                    qkv: w.qkv,
                    output: w.output,
                    pairs: w.pairs,
                    down: w.down,
                    attention_norm: w.attention_norm,
                    qkv_bias: w.qkv_bias,
                    q_norm: w.q_norm,
                    k_norm: w.k_norm,
                    output_bias: w.output_bias,
                    norm: w.feed_forward_norm,
                    router: w.router,
                    slots: slots.unwrap_or_default(),
                    cache: p.workspace.buffers.cache.offset(i * p.shape.layer_cache_bytes()),
                    width: u32_of(w.width),
                    window: u32_of(l.window.map_or(0, |w| w.min(p.shape.regime.context))),
                }
            })
            .collect()
    }

    /// Layers `layers` of a row in one launch, and the head if `wanted` is its place among the rows that ask for logits.
    #[must_use]
    pub fn persistent(
        &self,
        layers: Range<usize>,
        row: usize,
        wanted: Option<usize>,
        taps: bool,
    ) -> NamedLaunch {
        let (p, b) = (&self.places, &self.places.workspace.buffers);
        let (shape, spec, a) = (p.shape, p.spec, &p.spec.attention);
        let moe = spec.moe();
        let at = wanted.unwrap_or(0);
        let tap = |buffer: DevicePtr, width: usize| {
            if taps {
                buffer.offset(row * width * 4)
            } else {
                DevicePtr(0)
            }
        };
        #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
        let scale = 1.0 / (a.head_dim as f32).sqrt();
        let args = PersistentArgs {
            layers: b.layer_table.offset(layers.start * size_of::<PersistentLayer>()),
            rows: b.rows,
            arena: p.arena,
            record_bytes: p.slot_bytes as u64,
            down: shape.record.map_or(0, |r| r.pair_bytes as u64),
            hidden: b.hidden,
            qkv: b.qkv,
            partials: b.partials,
            counters: p.workspace.counters.persistent,
            attended: b.attended,
            shares: b.shares,
            inner: b.inner,
            dense_inner: b.dense_inner,
            rotary: b.rotary,
            head: p.weights.head,
            final_norm: p.weights.final_norm,
            logits: b.logits.offset(at * shape.vocab * 4),
            best: p.workspace.counters.best.offset(at * 8),
            chosen: b.chosen.offset(at * 4),
            host_chosen: p.workspace.host_chosen().offset(at * 4),
            attention_tap: tap(b.attention_tap, shape.hidden),
            feed_forward_tap: tap(b.feed_forward_tap, shape.hidden),
            router_logits: tap(b.router_logits, shape.experts()),
            ids: tap(b.ids, shape.top_k()),
            weights: tap(b.chosen_weights, shape.top_k()),
            count: u32_of(layers.len()),
            row: u32_of(row),
            width: u32_of(shape.hidden),
            heads: u32_of(a.heads),
            kv_heads: u32_of(a.kv_heads),
            head_dim: u32_of(a.head_dim),
            padded: u32_of(shape.padded),
            context: u32_of(shape.regime.context),
            experts: u32_of(shape.experts()),
            gates: u32_of(shape.router_columns() - shape.experts()),
            top_k: u32_of(shape.top_k()),
            expert_width: u32_of(shape.width()),
            block: u32_of(shape.record.map_or(0, |r| r.encoding.block())),
            renormalize: u32::from(moe.is_some_and(|m| m.renormalize)),
            vocab: wanted.map_or(0, |_| u32_of(shape.vocab)),
            qk_norm: norm_code(a.qk_norm),
            eps: spec.rms_norm_eps,
            clip: a.clip_qkv.unwrap_or(0.0),
            scale,
            shared_width: u32_of(shape.shared_width),
            other_width: u32_of(shape.mlp_width),
            unused: 0,
            profile: p.profile,
        };
        let blocks = self.functions.multiprocessors;
        let shared = persistent_shared(shape, blocks as usize);
        let mut launch = one(self.functions.persistent, [blocks, 1, 1], 512, shared, &args);
        launch.launch.cooperative = true;
        launch.launch.overlaps = false;
        launch
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
