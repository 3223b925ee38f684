//! A model on the device: its steps as launches, the common one as a graph.

use std::sync::Arc;

use horizon_core::backend::{
    CompiledModel, ExecutorId, Phase, StepBatch, StepError, StepOutput, StepReport, Ticket,
};
use horizon_core::cpu::step::check_batch;
use horizon_core::ids::LayerId;
use horizon_core::provider::{ExpertProvider, Hold};
use horizon_core::spec::ModelSpec;
use horizon_core::stage::{Stage, Tap, TapData};
use horizon_core::transport::Completion;

use crate::arena::PinnedMemory;
use crate::args::Row;
use crate::driver::{DevicePtr, DriverError, Graph, SharedDriver, Stream};
use crate::launches::{Builder, Executor, Functions, NamedLaunch, Places, StepShape};
use crate::shape::{Shape, u32_of};
use crate::transport::CudaTransport;
use crate::weights::DeviceWeights;
use crate::workspace::Workspace;

/// The step that decode takes: one row, whose logits are wanted.
const DECODE: StepShape = StepShape {
    rows: 1,
    wanted: 1,
    appended: false,
    taps: false,
    phase: Phase::Decode,
};

/// A model that is ready to run.
pub struct CudaModel {
    pub(crate) driver: SharedDriver,
    pub(crate) stream: Stream,
    pub(crate) spec: Arc<ModelSpec>,
    pub(crate) shape: Shape,
    pub(crate) weights: DeviceWeights,
    pub(crate) workspace: Workspace,
    pub(crate) embedding: PinnedMemory,
    pub(crate) transport: Option<Arc<CudaTransport>>,
    pub(crate) functions: Functions,
    pub(crate) executor: Executor,
    pub(crate) graph: Option<Graph>,
    pub(crate) filled: Vec<usize>,
    pub(crate) pending: Option<Pending>,
    pub(crate) next_ticket: u64,
    /// Where the persistent kernel leaves its clocks, for measurements.
    pub profile: DevicePtr,
    /// Where logits land on the host.
    pub(crate) host_logits: PinnedMemory,
}

/// A step that the device works on.
pub(crate) struct Pending {
    ticket: u64,
    wanted: usize,
    logits: bool,
    taps: Vec<Tap>,
    report: StepReport,
    hold: Hold,
    experts: Arc<dyn ExpertProvider>,
}

fn device(e: DriverError) -> StepError {
    StepError::Device(e.to_string())
}

impl CudaModel {
    pub(crate) fn builder(&self) -> Builder<'_> {
        let slots = self.transport.as_ref();
        Builder {
            places: Places {
                spec: &self.spec,
                shape: &self.shape,
                weights: &self.weights,
                workspace: &self.workspace,
                embedding: self.embedding.device(),
                arena: slots.map_or(DevicePtr(0), |t| t.slot_memory()),
                slot_bytes: slots.map_or(0, |t| t.slot_bytes()),
                slot_table: slots.map_or(DevicePtr(0), |t| t.slot_table()),
                profile: self.profile,
            },
            functions: &self.functions,
            executor: self.executor,
        }
    }

    /// The device that it is on.
    #[must_use]
    pub fn driver(&self) -> &SharedDriver {
        &self.driver
    }

    /// The stream that its steps run in.
    #[must_use]
    pub fn stream(&self) -> Stream {
        self.stream
    }

    /// Its sizes.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    fn layer(builder: &Builder<'_>, step: &StepShape, layer: usize, moe_row: usize) -> Vec<NamedLaunch> {
        match step.phase {
            Phase::Prefill => builder.layer_many(step, layer, moe_row),
            Phase::Decode => builder.layer(step, layer, moe_row),
        }
    }

    /// Whether the persistent kernel computes the step.
    fn persistent(&self, step: &StepShape) -> bool {
        step.phase == Phase::Decode && self.executor == Executor::PersistentV1
    }

    /// The launches of a step without taps, in order; rows `which` ask for logits.
    #[must_use]
    pub fn launches(&self, step: &StepShape, which: &[u32]) -> Vec<NamedLaunch> {
        let builder = self.builder();
        let mut out = builder.start(step);
        if self.persistent(step) {
            for row in 0..step.rows {
                let at = which.iter().position(|w| *w as usize == row);
                out.push(builder.persistent(0..self.shape.layers, row, at, false));
            }
            return out;
        }
        let mut moe_row = 0;
        for (layer, l) in self.spec.layers.iter().enumerate() {
            out.extend(Self::layer(&builder, step, layer, moe_row));
            moe_row += usize::from(l.moe().is_some());
        }
        out.extend(builder.end(step));
        out
    }

    /// Captures the decode step.
    pub(crate) fn capture(&mut self) -> Result<(), DriverError> {
        let launches: Vec<_> = self
            .launches(&DECODE, &[0])
            .into_iter()
            .map(|l| l.launch)
            .collect();
        // SAFETY: the builder's addresses belong to this model, which outlives the graph.
        #[expect(unsafe_code, reason = "launches with raw addresses")]
        let graph = unsafe { self.driver.graph(self.stream, &launches)? };
        self.graph = Some(graph);
        Ok(())
    }

    fn run(&self, launches: &[NamedLaunch]) -> Result<(), DriverError> {
        for l in launches {
            // SAFETY: the builder's addresses belong to this model, which waits for the stream before it is dropped.
            #[expect(unsafe_code, reason = "a launch with raw addresses")]
            unsafe {
                self.driver.launch(self.stream, &l.launch)?;
            }
        }
        Ok(())
    }

    fn read(&self, from: DevicePtr, bytes: usize) -> Result<Vec<u8>, DriverError> {
        let mut out = vec![0u8; bytes];
        // SAFETY: `from` is a buffer of the workspace with at least `bytes` bytes; the stream is synchronized before
        // `out` is used.
        #[expect(unsafe_code, reason = "a copy between raw addresses")]
        unsafe {
            self.driver
                .copy_to_host(self.stream, out.as_mut_ptr(), from, bytes)?;
        }
        self.driver.synchronize(self.stream)?;
        Ok(out)
    }

    fn read_f32(&self, from: DevicePtr, count: usize) -> Result<Vec<f32>, DriverError> {
        Ok(bytemuck::pod_collect_to_vec(&self.read(from, count * 4)?))
    }

    fn layer_taps(&self, layer: usize, rows: usize, taps: &mut Vec<Tap>) -> Result<(), DriverError> {
        let id = LayerId(u32_of(layer));
        let b = &self.workspace.buffers;
        let mut add = |stage, width, data| taps.push(Tap { stage, width, data });
        if let Some(moe) = self.spec.layers[layer].moe() {
            let logits = self.read_f32(b.router_logits, rows * moe.experts)?;
            add(Stage::RouterLogits(id), moe.experts, TapData::F32(logits));
            let ids = self.read(b.ids, rows * moe.top_k * 4)?;
            add(
                Stage::TopkIndex(id),
                moe.top_k,
                TapData::I32(bytemuck::pod_collect_to_vec(&ids)),
            );
            let weights = self.read_f32(b.chosen_weights, rows * moe.top_k)?;
            add(Stage::TopkWeight(id), moe.top_k, TapData::F32(weights));
        }
        let hidden = self.shape.hidden;
        for (stage, from) in [
            (Stage::AttentionOutput(id), b.attention_tap),
            (Stage::FeedForwardOutput(id), b.feed_forward_tap),
            (Stage::Hidden(id), b.hidden),
        ] {
            add(stage, hidden, TapData::F32(self.read_f32(from, rows * hidden)?));
        }
        Ok(())
    }

    fn start(&mut self, batch: &StepBatch, step: &StepShape, taps: &mut Vec<Tap>) -> Result<(), DriverError> {
        let rows: Vec<Row> = batch
            .rows
            .iter()
            .map(|r| Row {
                token: r.token,
                position: u32_of(r.position),
                sequence: u32_of(r.sequence),
                flags: 0,
            })
            .collect();
        let which: Vec<u32> = (0u32..)
            .zip(&batch.rows)
            .filter(|(_, r)| r.logits)
            .map(|(i, _)| i)
            .collect();
        self.workspace.describe(&rows, &which);
        match self.graph {
            Some(graph) if *step == DECODE => {
                // SAFETY: as `capture`; the step before has ended.
                #[expect(unsafe_code, reason = "launches with raw addresses")]
                unsafe {
                    self.driver.launch_graph(self.stream, graph)
                }
            }
            _ if step.taps => {
                let builder = self.builder();
                self.run(&builder.start(step))?;
                let persistent = self.persistent(step);
                let mut moe_row = 0;
                for (layer, l) in self.spec.layers.iter().enumerate() {
                    if persistent {
                        let part = |row| builder.persistent(layer..layer + 1, row, None, true);
                        self.run(&(0..step.rows).map(part).collect::<Vec<_>>())?;
                    } else {
                        self.run(&Self::layer(&builder, step, layer, moe_row))?;
                    }
                    moe_row += usize::from(l.moe().is_some());
                    self.layer_taps(layer, step.rows, taps)?;
                }
                if persistent {
                    let part =
                        |(at, row): (usize, &u32)| builder.persistent(0..0, *row as usize, Some(at), true);
                    self.run(&which.iter().enumerate().map(part).collect::<Vec<_>>())
                } else {
                    self.run(&builder.end(step))
                }
            }
            _ => self.run(&self.launches(step, &which)),
        }
    }
}

impl CompiledModel for CudaModel {
    fn executor(&self) -> ExecutorId {
        ExecutorId(self.executor.name())
    }

    fn prefill_executor(&self) -> ExecutorId {
        ExecutorId(Executor::GroupedT3.name())
    }

    fn enqueue(&mut self, batch: &StepBatch, experts: &Arc<dyn ExpertProvider>) -> Result<Ticket, StepError> {
        if self.pending.is_some() {
            return Err(StepError::Invalid("a step is in flight; finish it first".into()));
        }
        if !experts.complete() {
            return Err(StepError::Invalid(
                "the cuda backend runs with all experts resident; leave out -c and --vram".into(),
            ));
        }
        check_batch(&self.spec, &self.shape.regime, &mut self.filled, batch)?;
        if batch.phase == Phase::Decode && batch.rows.len() > self.shape.few_rows() {
            return Err(StepError::Invalid(format!(
                "{} rows in a decode step; there is room for {}",
                batch.rows.len(),
                self.shape.few_rows()
            )));
        }
        let mut sequences: Vec<_> = batch.rows.iter().map(|r| r.sequence).collect();
        sequences.sort_unstable();
        let step = StepShape {
            rows: batch.rows.len(),
            wanted: batch.rows.iter().filter(|r| r.logits).count(),
            appended: sequences.windows(2).any(|w| w[0] == w[1]),
            taps: batch.taps,
            phase: batch.phase,
        };
        let hold = experts.capture();
        let mut taps = Vec::new();
        if let Err(e) = self.start(batch, &step, &mut taps) {
            experts.release(hold, Completion::DONE);
            return Err(device(e));
        }
        let routed = step.rows * self.shape.top_k() * self.spec.moe_layers().count();
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.pending = Some(Pending {
            ticket,
            wanted: step.wanted,
            logits: !batch.tokens_only,
            taps,
            report: StepReport {
                routed: routed as u64,
                records: routed as u64,
            },
            hold,
            experts: experts.clone(),
        });
        Ok(Ticket(ticket))
    }

    fn finish(&mut self, ticket: Ticket) -> Result<StepOutput, StepError> {
        let Some(pending) = self.pending.take_if(|p| p.ticket == ticket.0) else {
            return Err(StepError::UnknownTicket(ticket.0));
        };
        let mut output = StepOutput {
            taps: pending.taps,
            report: pending.report,
            ..StepOutput::default()
        };
        let values = pending.wanted * self.shape.vocab;
        let copied = if pending.logits && values > 0 {
            // SAFETY: both buffers hold the logits of `max_rows` rows; the stream is synchronized before they are read.
            #[expect(unsafe_code, reason = "a copy between raw addresses")]
            unsafe {
                let from = self.workspace.buffers.logits;
                self.driver
                    .copy_to_host(self.stream, self.host_logits.host(), from, values * 4)
            }
        } else {
            Ok(())
        };
        let ended = copied.and_then(|()| self.driver.synchronize(self.stream));
        pending.experts.release(pending.hold, Completion::DONE);
        ended.map_err(device)?;
        if pending.logits {
            output.logits = bytemuck::cast_slice(&self.host_logits.bytes()[..values * 4]).to_vec();
        }
        output.tokens = self.workspace.choices(pending.wanted);
        Ok(output)
    }
}

impl Drop for CudaModel {
    fn drop(&mut self) {
        // Buffers are given back only when nothing uses them; a lost device uses nothing.
        let _ = self.driver.synchronize(self.stream);
    }
}
