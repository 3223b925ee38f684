//! One tensor's way from the checkpoint into the artifact.

use std::sync::atomic::{AtomicBool, Ordering};

use horizon_core::artifact::Progress;
use horizon_core::artifact::digest::Summer;
use horizon_core::artifact::writer::{ArtifactWriter, TensorPlan};
use horizon_core::dtype::{DType, NarrowingReport};
use horizon_core::qpacked::{BlockSize, QpackedLayout, QuantizationError};
use horizon_core::roles::{ExpertRole, dense_tensors, expert_tensors};

use super::{PackError, PackOptions};
use crate::checkpoint::{CheckpointTensor, OpenCheckpoint};
use crate::source::{ModelSource, PackedNames, packed_layout};
use crate::transform::{Scratch, le_bytes, narrow_tensor, quantize_tensor};

/// A tensor to carry over, and its place in the artifact.
pub(super) enum Job {
    /// A non-routed tensor of shard 0.
    Dense {
        name: String,
        shape: Vec<usize>,
        index: usize,
    },
    /// A routed matrix; its codes are tensor `index` of the shard, its scales the one after.
    Expert {
        name: String,
        role: ExpertRole,
        layout: QpackedLayout,
        shard: usize,
        index: usize,
    },
}

/// What a job found out.
pub(super) struct Outcome {
    /// What narrowing lost.
    pub narrowing: NarrowingReport,
    /// What quantization lost.
    pub loss: Option<(ExpertRole, QuantizationError)>,
    /// The tensor's line in the identity of the source.
    pub identity: String,
}

/// The tensors of every shard, and the job for each: first the non-routed ones, then the experts of each layer.
pub(super) fn plan(source: &ModelSource, block: BlockSize) -> (Vec<Vec<TensorPlan>>, Vec<Job>) {
    let spec = source.spec();
    let mut shards = vec![Vec::new()];
    let mut jobs = Vec::new();
    for (role, shape) in dense_tensors(spec) {
        let name = source.dense_name(role);
        jobs.push(Job::Dense {
            name: name.clone(),
            shape: shape.clone(),
            index: shards[0].len(),
        });
        shards[0].push(TensorPlan {
            name,
            dtype: DType::F16,
            shape,
        });
    }
    let mut layer = None;
    for role in expert_tensors(spec) {
        if layer != Some(role.layer) {
            layer = Some(role.layer);
            shards.push(Vec::new());
        }
        let shard = shards.len() - 1;
        let name = source.expert_name(role);
        let layout = packed_layout(spec, role.matrix, block);
        let packed = PackedNames::new(&name);
        jobs.push(Job::Expert {
            name,
            role,
            layout,
            shard,
            index: shards[shard].len(),
        });
        shards[shard].push(TensorPlan {
            name: packed.codes,
            dtype: DType::U8,
            shape: vec![layout.rows, layout.row_bytes()],
        });
        shards[shard].push(TensorPlan {
            name: packed.scales,
            dtype: DType::F16,
            shape: vec![layout.rows, layout.row_blocks()],
        });
    }
    (shards, jobs)
}

/// What all jobs share.
pub(super) struct Context<'a> {
    pub open: &'a OpenCheckpoint<'a>,
    pub writer: &'a ArtifactWriter,
    pub options: &'a PackOptions,
    pub progress: &'a dyn Progress,
    pub cancel: &'a AtomicBool,
}

impl Context<'_> {
    pub fn run(&self, job: &Job, scratch: &mut Scratch) -> Result<Outcome, PackError> {
        match job {
            Job::Dense { name, shape, index } => self.dense(name, shape, *index, scratch),
            Job::Expert {
                name,
                role,
                layout,
                shard,
                index,
            } => self.expert(name, *role, layout, (*shard, *index), scratch),
        }
    }

    fn dense(
        &self,
        name: &str,
        shape: &[usize],
        index: usize,
        scratch: &mut Scratch,
    ) -> Result<Outcome, PackError> {
        let tensor = self.open.checkpoint().tensor(name, shape)?;
        let mut out = self.writer.tensor(0, index);
        let mut sum = Summer::new();
        let narrowing = narrow_tensor(self.open, &tensor, scratch, Some(&mut sum), |_, piece| {
            out.write(le_bytes(piece))?;
            self.step((piece.len() * tensor.dtype.size()) as u64)
        })?;
        out.finish()?;
        Ok(Outcome {
            narrowing,
            loss: None,
            identity: line(&tensor, shape, &sum),
        })
    }

    fn expert(
        &self,
        name: &str,
        role: ExpertRole,
        layout: &QpackedLayout,
        (shard, index): (usize, usize),
        scratch: &mut Scratch,
    ) -> Result<Outcome, PackError> {
        let shape = [layout.rows, layout.cols];
        let tensor = self.open.checkpoint().tensor(name, &shape)?;
        let mut codes_out = self.writer.tensor(shard, index);
        let mut scales_out = self.writer.tensor(shard, index + 1);
        let mut sum = Summer::new();
        let method = self.options.quantizer;
        let loss = quantize_tensor(
            self.open,
            &tensor,
            layout,
            method,
            scratch,
            Some(&mut sum),
            |codes, scales| {
                codes_out.write(codes)?;
                scales_out.write(le_bytes(scales))?;
                let rows = codes.len() / layout.row_bytes();
                self.step((rows * layout.cols * tensor.dtype.size()) as u64)
            },
        )?;
        codes_out.finish()?;
        scales_out.finish()?;
        Ok(Outcome {
            narrowing: NarrowingReport::default(),
            loss: Some((role, loss)),
            identity: line(&tensor, &shape, &sum),
        })
    }

    fn step(&self, bytes: u64) -> Result<(), PackError> {
        self.progress.advance(bytes);
        if self.cancel.load(Ordering::Relaxed) {
            Err(PackError::Cancelled)
        } else {
            Ok(())
        }
    }
}

/// `NAME DTYPE [d,d] XXH3-128`: a tensor's line in the identity of the source.
fn line(tensor: &CheckpointTensor<'_>, shape: &[usize], sum: &Summer) -> String {
    let extents: Vec<String> = shape.iter().map(ToString::to_string).collect();
    format!(
        "{} {} [{}] {}\n",
        tensor.name,
        tensor.dtype,
        extents.join(","),
        sum.finish()
    )
}
