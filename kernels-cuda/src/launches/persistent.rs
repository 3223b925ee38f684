//! A whole token in one launch.

use std::ops::Range;

use super::functions::persistent_shared;
use super::{Builder, NamedLaunch, one};
use crate::args::{PersistentArgs, PersistentLayer};
use crate::driver::DevicePtr;
use crate::shape::{norm_code, u32_of};

impl Builder<'_> {
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
    ///
    /// # Panics
    /// When the model was opened with another executor, on a card that has no room for this one.
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
        let tap = |buffer: DevicePtr, width: usize| tap_row(taps, buffer, row * width);
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
        let function = self
            .functions
            .persistent
            .expect("opened only where its limits are kept");
        let mut launch = one(function, [blocks, 1, 1], 512, shared, &args);
        launch.launch.cooperative = true;
        launch.launch.overlaps = false;
        launch
    }
}

/// Where value `at` of a tap lies, if taps are taken.
fn tap_row(taps: bool, buffer: DevicePtr, at: usize) -> DevicePtr {
    if taps { buffer.offset(at * 4) } else { DevicePtr(0) }
}
