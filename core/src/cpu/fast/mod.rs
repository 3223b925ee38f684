//! The fast CPU backend: tiled records, SIMD chosen at run time, all cores.
//!
//! It gives the bits of [`ReferenceCpu`](super::ReferenceCpu) on every instruction set and for any number of
//! threads: a product's rows are cut into tasks, but each output is one [`kernels`](super::simd::kernels) sum.

mod attention;
mod feed_forward;
mod rows;
mod tasks;
mod workspace;

use std::num::NonZeroUsize;
use std::sync::Arc;

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::kv::KvCache;
use super::numerics::{RotaryTable, argmax};
use super::simd::Isa;
use super::simd::kernels::padded;
use super::step::{Finished, Weights, check_batch};
use super::tiling::{CpuTiling, TiledLayout};
use crate::backend::{
    Activations, Backend, BackendError, CompiledModel, ExecutorId, Plan, Regime, StepBatch, StepError,
    StepOutput, Ticket,
};
use crate::dense::DenseStore;
use crate::ids::LayerId;
use crate::provider::{ExpertProvider, SlotMemory};
use crate::record::{ExpertEncoding, RecordLayout, RecordTiling};
use crate::roles::DenseRole;
use crate::spec::ModelSpec;
use crate::stage::{Stage, Tap, TapData};
use crate::transport::Completion;
use rows::norm_rows;
use tasks::{Tasks, transpose};
use workspace::{LOGIT_ROWS, Workspace};

const NAME: &str = "cpu";
/// Most threads: more than any machine this is for has cores, few enough to start in no time.
pub const MAX_THREADS: usize = 1024;

/// The fast CPU backend.
pub struct FastCpu {
    slots: Arc<dyn SlotMemory>,
    encoding: ExpertEncoding,
    isa: Isa,
    pool: Arc<ThreadPool>,
    integers: bool,
}

impl FastCpu {
    /// A backend that executes experts of `encoding` from `slots`, on `threads` threads (default: all cores).
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] when the threads cannot be started.
    pub fn new(
        threads: Option<NonZeroUsize>,
        slots: Arc<dyn SlotMemory>,
        encoding: ExpertEncoding,
    ) -> Result<Self, BackendError> {
        Self::with_isa(Isa::best(), threads, slots, encoding)
    }

    /// The same with a given instruction set.
    ///
    /// # Errors
    /// As [`FastCpu::new`].
    pub fn with_isa(
        isa: Isa,
        threads: Option<NonZeroUsize>,
        slots: Arc<dyn SlotMemory>,
        encoding: ExpertEncoding,
    ) -> Result<Self, BackendError> {
        if let Some(n) = threads.filter(|n| n.get() > MAX_THREADS) {
            let reason = format!("{n} threads asked for; at most {MAX_THREADS} can be used");
            return Err(BackendError::Unsupported {
                backend: NAME,
                reason,
            });
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads.map_or(0, NonZeroUsize::get))
            .thread_name(|i| format!("horizon-cpu-{i}"))
            .build()
            .map_err(|e| BackendError::Unsupported {
                backend: NAME,
                reason: format!("cannot start threads: {e}"),
            })?;
        Ok(Self {
            slots,
            encoding,
            isa,
            pool: Arc::new(pool),
            integers: false,
        })
    }

    /// Multiplies packed experts with rows of 16-bit integers (executor `cpu-grouped-i16`): faster where the CPU, not
    /// memory, is the limit. Only with packed experts and [`Activations::F16`].
    #[must_use]
    pub fn with_integers(mut self, integers: bool) -> Self {
        self.integers = integers;
        self
    }

    fn form(&self) -> ExpertForm {
        match (self.encoding, self.integers) {
            (ExpertEncoding::F16, _) => ExpertForm::F16,
            (ExpertEncoding::Qpacked { .. }, false) => ExpertForm::Packed,
            (ExpertEncoding::Qpacked { .. }, true) => ExpertForm::PackedIntegers,
        }
    }

    /// The arrangement that records must be loaded in.
    #[must_use]
    pub fn tiling() -> &'static dyn RecordTiling {
        &CpuTiling
    }

    /// The instruction set in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads in use.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}

impl Backend for FastCpu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, spec: &ModelSpec, regime: &Regime) -> Result<Plan, BackendError> {
        if self.integers && (self.form() == ExpertForm::F16 || regime.activations == Activations::F32) {
            return Err(BackendError::Unsupported {
                backend: NAME,
                reason:
                    "executor cpu-grouped-i16 multiplies packed experts with 16-bit activations: it needs \
                         --experts qpacked and --activations f16"
                        .into(),
            });
        }
        Ok(Plan {
            ledger: vec![
                ("KV cache", KvCache::bytes(spec, regime) as u64),
                (
                    "rotary table",
                    RotaryTable::bytes(regime.context, spec.attention.head_dim) as u64,
                ),
                ("workspace", Workspace::bytes(spec, regime) as u64),
            ],
            regime: *regime,
        })
    }

    fn open(
        &self,
        spec: &Arc<ModelSpec>,
        plan: &Plan,
        dense: &Arc<DenseStore>,
    ) -> Result<Box<dyn CompiledModel>, BackendError> {
        let regime = plan.regime;
        let record = RecordLayout::new(spec, self.encoding);
        Ok(Box::new(FastModel {
            pool: self.pool.clone(),
            kv: KvCache::new(NAME, spec, &regime)?,
            workspace: Workspace::new(spec, &regime),
            filled: vec![0; regime.sequences],
            finished: Finished::default(),
            context: Context {
                weights: Weights::new(NAME, spec, dense)?,
                rotary: RotaryTable::new(regime.context, spec.attention.head_dim, spec.attention.rope_theta),
                spec: spec.clone(),
                tiled: record.as_ref().map(TiledLayout::new),
                form: self.form(),
                slots: self.slots.clone(),
                isa: self.isa,
                regime,
            },
        }))
    }
}

/// How routed experts are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpertForm {
    /// FP16 weights: the control arm.
    F16,
    /// Packed weights, FP32 fused multiply-adds.
    Packed,
    /// Packed weights, rows rounded to 16-bit integers, exact integer sums of a word.
    PackedIntegers,
}

/// What a step reads and never writes.
struct Context {
    spec: Arc<ModelSpec>,
    regime: Regime,
    isa: Isa,
    weights: Weights,
    slots: Arc<dyn SlotMemory>,
    tiled: Option<TiledLayout>,
    form: ExpertForm,
    rotary: RotaryTable,
}

impl Context {
    fn narrows(&self) -> bool {
        self.regime.activations == Activations::F16
    }
}

struct FastModel {
    pool: Arc<ThreadPool>,
    context: Context,
    kv: KvCache,
    workspace: Workspace,
    filled: Vec<usize>,
    finished: Finished,
}

impl CompiledModel for FastModel {
    fn executor(&self) -> ExecutorId {
        match self.context.form {
            ExpertForm::PackedIntegers => ExecutorId("cpu-grouped-i16"),
            ExpertForm::F16 | ExpertForm::Packed => ExecutorId("cpu-grouped"),
        }
    }

    fn enqueue(&mut self, batch: &StepBatch, experts: &Arc<dyn ExpertProvider>) -> Result<Ticket, StepError> {
        check_batch(&self.context.spec, &self.context.regime, &mut self.filled, batch)?;
        let pool = self.pool.clone();
        let output = pool.install(|| self.step(batch, experts.as_ref()))?;
        Ok(self.finished.put(output))
    }

    fn finish(&mut self, ticket: Ticket) -> Result<StepOutput, StepError> {
        self.finished.take(&ticket)
    }
}

impl FastModel {
    fn step(&mut self, batch: &StepBatch, experts: &dyn ExpertProvider) -> Result<StepOutput, StepError> {
        let (c, ws) = (&self.context, &mut self.workspace);
        let width = c.spec.hidden;
        let used = batch.rows.len() * width;
        let mut out = StepOutput::default();
        let mut hold = experts.capture();
        for (row, h) in batch.rows.iter().zip(ws.hidden.chunks_exact_mut(width)) {
            c.weights.embed(row.token, h);
        }
        for (layer, l) in (0u32..).map(LayerId).zip(&c.spec.layers) {
            let taps = batch.taps.then_some(&mut out.taps);
            attention::attention(c, &mut self.kv, ws, &batch.rows, layer, l.window);
            add(&mut ws.hidden[..used], &ws.block[..used]);
            let attended = batch
                .taps
                .then(|| tap(Stage::AttentionOutput(layer), width, &ws.block[..used]));
            let step = feed_forward::Step {
                c,
                layer,
                rows: batch.rows.len(),
            };
            step.feed_forward(&l.feed_forward, ws, experts, &mut hold, taps, &mut out.report)?;
            add(&mut ws.hidden[..used], &ws.block[..used]);
            if batch.taps {
                out.taps.extend(attended);
                out.taps
                    .push(tap(Stage::FeedForwardOutput(layer), width, &ws.block[..used]));
                out.taps
                    .push(tap(Stage::Hidden(layer), width, &ws.hidden[..used]));
            }
        }
        experts.release(hold, Completion::DONE);
        head(c, ws, batch, &mut out);
        Ok(out)
    }
}

/// Final norm and output head of the rows that want logits.
fn head(c: &Context, ws: &mut Workspace, batch: &StepBatch, out: &mut StepOutput) {
    let (width, vocab, stride) = (c.spec.hidden, c.spec.vocab, padded(c.spec.hidden));
    let wanted: Vec<usize> = (0..batch.rows.len()).filter(|i| batch.rows[*i].logits).collect();
    out.logits.reserve_exact(wanted.len() * vocab);
    for rows in wanted.chunks(LOGIT_ROWS) {
        let inputs = &mut ws.inputs[..rows.len() * stride];
        for (row, x) in rows.iter().zip(inputs.chunks_exact_mut(stride)) {
            let weight = c.weights.get(DenseRole::FinalNorm);
            norm_rows(c, &ws.hidden[row * width..][..width], weight, x, c.narrows());
        }
        let raw = &mut ws.raw[..rows.len() * vocab];
        let mut tasks = Tasks::default();
        tasks.dense(c.weights.head(), inputs, raw);
        tasks.run(c.isa);
        let start = out.logits.len();
        out.logits.resize(start + rows.len() * vocab, 0.0);
        transpose(raw, rows.len(), &mut out.logits[start..], vocab);
        out.tokens
            .extend(out.logits[start..].chunks_exact(vocab).map(argmax));
    }
}

fn add(hidden: &mut [f32], block: &[f32]) {
    for (h, b) in hidden.iter_mut().zip(block) {
        *h += b;
    }
}

fn tap(stage: Stage, width: usize, data: &[f32]) -> Tap {
    Tap {
        stage,
        width,
        data: TapData::F32(data.to_vec()),
    }
}
