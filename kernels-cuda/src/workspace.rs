//! The buffers of a step: carved once, at addresses that never change.

use crate::arena::{Arena, Carver, Piece, PinnedMemory};
use crate::args::{MOST_SPLITS, PersistentLayer, Row};
use crate::driver::{DevicePtr, DriverError, SharedDriver};
use crate::executors::grouped_t3::WORK_BYTES;
use crate::shape::Shape;

macro_rules! pieces {
    ($(#[$doc:meta])* $plan:ident, $placed:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        struct $plan { $($field: Piece,)* }

        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $placed { $($(#[$field_doc])* pub $field: DevicePtr,)* }

        impl $plan {
            fn place(&self, arena: &Arena) -> $placed {
                $placed { $($field: arena.at(self.$field),)* }
            }
        }
    };
}

pieces! {
    /// Buffers of a step; `rows` stands for the most rows of a step.
    Pieces, Buffers {
        /// `Row [rows]`
        rows,
        /// `u32 [rows]`: rows that ask for logits.
        which,
        /// `f32 [rows, hidden]`: the residual stream.
        hidden,
        /// `f32 [rows, qkv]`
        qkv,
        /// `f16 [rows, heads * head_dim]`
        attended,
        /// `f32 [rows, heads, MOST_SPLITS, padded + 2]`
        partials,
        /// `f32 [rows, tiles, router columns + 1]`
        shares,
        /// `f32 [rows, experts]`
        router_logits,
        /// `u32 [rows, top_k]`
        ids,
        /// `f32 [rows, top_k]`
        chosen_weights,
        /// `f32 [rows]`
        gate,
        /// `f16 [rows, hidden]`
        normed,
        /// `f16 [rows, top_k, width]`
        inner,
        /// `f16 [rows, dense_width]`
        dense_inner,
        /// `f32 [rows, top_k, hidden]`
        outputs,
        /// `f32 [rows, hidden]`
        routed,
        /// `f32 [rows, hidden]`
        dense_output,
        /// `f32 [rows, hidden]`: attention output, for taps.
        attention_tap,
        /// `f32 [rows, hidden]`: feed-forward output, for taps.
        feed_forward_tap,
        /// `f32 [rows, vocab]`
        logits,
        /// `u32 [rows]`
        chosen,
        /// `f16 [rows, heads, padded]`: queries of steps of many rows.
        queries,
        /// `u32 [rows * top_k]`: pairs of row and rank by expert.
        order,
        /// Work tiles of the grouped executor.
        work,
        /// `u32`: how many.
        work_count,
        /// `f32 [context, head_dim / 2, 2]`
        rotary,
        /// `PersistentLayer [layers]`
        layer_table,
        /// The KV cache, layer by layer.
        cache,
    }
}

pieces! {
    /// Counters: zero between steps.
    CounterPieces, Counters {
        /// `u32 [rows, heads]`
        attend,
        /// `u32 [groups of rows]`
        project,
        /// `u32 [groups of rows]`
        head,
        /// `u64 [rows]`
        best,
        /// `u32 [layers, fused counters]`
        fused,
        /// `u32 [3 + heads]`
        persistent,
        /// Of the grouped executor.
        grouped,
    }
}

/// Sizes of the workspace, before anything is allocated.
pub struct WorkspacePlan {
    cache: Carver,
    buffers: Carver,
    counters: Carver,
    pieces: Pieces,
    counter_pieces: CounterPieces,
    host_bytes: usize,
    rows: usize,
}

impl WorkspacePlan {
    /// The workspace of a model.
    #[must_use]
    pub fn new(shape: &Shape) -> Self {
        let m = shape.regime.max_rows;
        // Steps of one row or a few.
        let few = shape.few_rows();
        let mut cache = Carver::new("KV cache");
        let mut b = Carver::new("workspace");
        let mut c = Carver::new("counters");
        let (h, k) = (shape.hidden, shape.top_k());
        let groups = m.div_ceil(crate::shape::TOKENS);
        let pieces = Pieces {
            rows: b.take(m, size_of::<Row>()),
            which: b.take(m, 4),
            hidden: b.take(m * h, 4),
            qkv: b.take(m * shape.qkv(), 4),
            attended: b.take(m * shape.attended(), 2),
            partials: b.take(few * shape.heads * MOST_SPLITS * (shape.padded + 2), 4),
            shares: b.take(few * shape.hidden_tiles() * (shape.router_columns() + 1), 4),
            router_logits: b.take(m * shape.experts(), 4),
            ids: b.take(m * k, 4),
            chosen_weights: b.take(m * k, 4),
            gate: b.take(m, 4),
            normed: b.take(m * h, 2),
            inner: b.take(m * k * shape.width(), 2),
            dense_inner: b.take(m * shape.dense_width, 2),
            outputs: b.take(m * k * h, 4),
            routed: b.take(m * h, 4),
            dense_output: b.take(m * h, 4),
            attention_tap: b.take(m * h, 4),
            feed_forward_tap: b.take(m * h, 4),
            logits: b.take(m * shape.vocab, 4),
            chosen: b.take(m, 4),
            queries: b.take(m * shape.heads * shape.padded, 2),
            order: b.take(m * k, 4),
            work: b.take(shape.experts().min(m * k) + m * k / 8, WORK_BYTES),
            work_count: b.take(1, 4),
            layer_table: b.take(shape.layers, size_of::<PersistentLayer>()),
            rotary: b.take(shape.regime.context * (shape.head_dim / 2), 8),
            cache: cache.take(shape.layers * shape.layer_cache_bytes(), 1),
        };
        let counter_pieces = CounterPieces {
            attend: c.take(m * shape.heads, 4),
            project: c.take(groups, 4),
            head: c.take(groups, 4),
            best: c.take(m, 8),
            fused: c.take(shape.layers * shape.fused_counters(), 4),
            persistent: c.take(3 + shape.heads, 4),
            grouped: c.take(m * shape.hidden_tiles().div_ceil(8), 4),
        };
        Self {
            cache,
            buffers: b,
            counters: c,
            pieces,
            counter_pieces,
            host_bytes: m * (size_of::<Row>() + 8),
            rows: m,
        }
    }

    /// Bytes by purpose.
    #[must_use]
    pub fn ledger(&self) -> Vec<(&'static str, u64)> {
        vec![self.cache.ledger(), self.buffers.ledger(), self.counters.ledger()]
    }

    /// Allocates everything; counters are zeroed when `stream` is next synchronized.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn allocate(
        &self,
        driver: &SharedDriver,
        stream: crate::driver::Stream,
    ) -> Result<Workspace, DriverError> {
        let (cache, buffers) = (self.cache.allocate(driver)?, self.buffers.allocate(driver)?);
        let counters = self.counters.allocate(driver)?;
        let placed_counters = self.counter_pieces.place(&counters);
        for piece in [
            self.counter_pieces.attend,
            self.counter_pieces.project,
            self.counter_pieces.head,
            self.counter_pieces.best,
            self.counter_pieces.fused,
            self.counter_pieces.persistent,
            self.counter_pieces.grouped,
        ] {
            // SAFETY: the piece lies in the arena that was just allocated.
            #[expect(unsafe_code, reason = "a fill of raw device memory")]
            unsafe {
                driver.fill(stream, counters.at(piece), 0, piece.bytes)?;
            }
        }
        let mut placed = Pieces {
            cache: Piece::default(),
            ..copy(&self.pieces)
        }
        .place(&buffers);
        placed.cache = cache.at(self.pieces.cache);
        // SAFETY: the cache is that long. Padding of heads stays zero for ever; everything else is written first.
        #[expect(unsafe_code, reason = "a fill of raw device memory")]
        unsafe {
            driver.fill(stream, placed.cache, 0, self.pieces.cache.bytes)?;
        }
        Ok(Workspace {
            buffers: placed,
            counters: placed_counters,
            host: PinnedMemory::new(driver, self.host_bytes)?,
            rows: self.rows,
            _arenas: [cache, buffers, counters],
        })
    }
}

fn copy(p: &Pieces) -> Pieces {
    Pieces { ..*p }
}

/// The workspace of an open model.
pub struct Workspace {
    /// Buffers.
    pub buffers: Buffers,
    /// Counters.
    pub counters: Counters,
    /// What host and device exchange: rows, which of them ask for logits, what was chosen.
    pub host: PinnedMemory,
    rows: usize,
    _arenas: [Arena; 3],
}

impl Workspace {
    /// Where the device finds the rows of the step.
    #[must_use]
    pub fn host_rows(&self) -> DevicePtr {
        self.host.device()
    }

    /// Where the device finds which rows ask for logits.
    #[must_use]
    pub fn host_which(&self) -> DevicePtr {
        self.host.device().offset(self.rows * size_of::<Row>())
    }

    /// Where the device puts what was chosen.
    #[must_use]
    pub fn host_chosen(&self) -> DevicePtr {
        self.host_which().offset(self.rows * 4)
    }

    /// Describes a step; the device is not working on another.
    pub fn describe(&mut self, rows: &[Row], which: &[u32]) {
        let (most, size) = (self.rows, size_of::<Row>());
        let bytes = self.host.bytes_mut();
        bytes[..size_of_val(rows)].copy_from_slice(bytemuck::cast_slice(rows));
        bytes[most * size..][..size_of_val(which)].copy_from_slice(bytemuck::cast_slice(which));
    }

    /// What the device chose for the first `wanted` rows that asked; its step has ended.
    #[must_use]
    pub fn choices(&self, wanted: usize) -> Vec<u32> {
        let start = self.rows * (size_of::<Row>() + 4);
        let bytes = &self.host.bytes()[start..start + wanted * 4];
        bytes
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    }
}
