//! Brings a model into memory: verified from an artifact, or narrowed and quantized from a checkpoint.

use std::sync::{Arc, Mutex, PoisonError};

use horizon_core::artifact::manifest::{DTypeRecord, LayerError};
use horizon_core::artifact::{Artifact, ArtifactError, Check, Progress};
use horizon_core::dense::{self, DenseFormat, DenseStore};
use horizon_core::dtype::NarrowingReport;
use horizon_core::image::ExpertImage;
use horizon_core::qpacked::{BlockSize, QuantizationError, Quantizer};
use horizon_core::record::{ExpertEncoding, RecordLayout, RecordTiling};
use horizon_core::roles::{ExpertRole, dense_tensors, expert_tensors};
use horizon_core::spec::ModelSpec;
use thiserror::Error;

use super::read::{ArtifactReader, CheckpointReader};
use super::{ModelSource, Origin, expert_shape};
use crate::checkpoint::{CheckpointError, OpenCheckpoint};
use crate::pack::{DEFAULT_BLOCK, DEFAULT_QUANTIZER};
use crate::transform::ScratchPool;

/// How routed experts are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertsMode {
    /// Packed. What is not given follows the artifact, or the defaults of `pack`.
    Qpacked {
        /// Values a scale.
        block: Option<BlockSize>,
        /// How scales are chosen.
        quantizer: Option<Quantizer>,
    },
    /// FP16, the unquantized control arm; needs the original checkpoint.
    F16,
}

impl Default for ExpertsMode {
    fn default() -> Self {
        Self::Qpacked {
            block: None,
            quantizer: None,
        }
    }
}

/// How to load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Form of the routed experts.
    pub experts: ExpertsMode,
    /// Form of the non-routed weights.
    pub dense: DenseFormat,
    /// What is checked of an artifact's bytes.
    pub check: Check,
}

/// A model in memory, its source closed.
#[derive(Debug)]
pub struct LoadedModel {
    /// The model.
    pub spec: Arc<ModelSpec>,
    /// Non-routed weights.
    pub dense: Arc<DenseStore>,
    /// Routed experts; `None` in a model that has none.
    pub image: Option<Arc<ExpertImage>>,
    /// Their canonical record.
    pub layout: Option<RecordLayout>,
    /// How the experts are held.
    pub encoding: ExpertEncoding,
    /// How their scales were chosen; `None` in the control arm.
    pub quantizer: Option<Quantizer>,
    /// Element types, each by itself.
    pub dtypes: DTypeRecord,
    /// What narrowing to FP16 lost: the non-routed weights, and the experts in the control arm.
    pub narrowing: NarrowingReport,
    /// What quantization lost, by layer; empty in the control arm.
    pub quantization_error: Vec<LayerError>,
    /// What the user should know.
    pub notes: Vec<String>,
    /// What belongs into a record of the run and is no news: how much narrowing to FP16 lost.
    pub details: Vec<String>,
}

/// A model that could not be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// An artifact has no unquantized experts.
    #[error(
        "{place}: --experts f16 needs the original checkpoint: an artifact holds the experts as INT4 only; \
         give the checkpoint's directory with -m"
    )]
    NoF16Experts {
        /// The artifact.
        place: String,
    },
    /// The artifact was packed with other settings.
    #[error(
        "{place}: {flag} {asked} was asked for, but the artifact was packed with {found}; leave {flag} away, \
         or pack the checkpoint again"
    )]
    OtherSettings {
        /// The artifact.
        place: String,
        /// The flag.
        flag: &'static str,
        /// Its value.
        asked: String,
        /// The artifact's.
        found: String,
    },
    /// The artifact cannot be read.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A tensor could not be brought into memory, or there is not enough of it.
    #[error(transparent)]
    Weights(#[from] dense::LoadError),
}

impl ModelSource {
    /// Brings the model into memory on all threads of the current pool. Afterwards nothing refers to the files.
    ///
    /// # Errors
    /// [`LoadError`] naming file and tensor, or the setting that cannot be had.
    pub fn load(
        &self,
        options: &LoadOptions,
        tiling: &dyn RecordTiling,
        progress: &dyn Progress,
    ) -> Result<LoadedModel, LoadError> {
        match &self.origin {
            Origin::Artifact(a) => self.load_artifact(a, options, tiling, progress),
            Origin::Checkpoint(c) => {
                let mut loaded = self.load_checkpoint(&c.open_files()?, options, tiling, progress)?;
                if loaded.quantizer.is_some() {
                    loaded.notes.insert(
                        0,
                        format!(
                            "{}: experts packed in memory; `horizon pack` keeps the result and starts faster",
                            c.place().display()
                        ),
                    );
                }
                Ok(loaded)
            }
            Origin::Memory(c) => self.load_checkpoint(&c.open_files()?, options, tiling, progress),
        }
    }

    fn load_artifact(
        &self,
        artifact: &Artifact,
        options: &LoadOptions,
        tiling: &dyn RecordTiling,
        progress: &dyn Progress,
    ) -> Result<LoadedModel, LoadError> {
        let manifest = artifact.manifest();
        let packed = manifest.quantizer;
        check_settings(artifact, options)?;
        let encoding = ExpertEncoding::Qpacked { block: packed.block };
        progress.begin(
            "loading",
            manifest.shards.iter().map(|s| s.bytes - s.header_bytes).sum(),
        );
        let reader = ArtifactReader {
            source: self,
            shards: artifact.open_shards()?,
            check: options.check,
            progress,
        };
        let dense = DenseStore::load_as(&self.spec, options.dense, &reader)?;
        let layout = RecordLayout::new(&self.spec, encoding);
        let image = layout
            .as_ref()
            .map(|l| ExpertImage::load(&self.spec, l, tiling, &reader))
            .transpose()?;
        Ok(LoadedModel {
            spec: Arc::clone(&self.spec),
            dense: Arc::new(dense),
            image: image.map(Arc::new),
            layout,
            encoding,
            quantizer: Some(packed.method),
            dtypes: manifest.dtypes.clone(),
            narrowing: manifest.narrowing,
            quantization_error: manifest.quantization_error.clone(),
            notes: self.notes.clone(),
            details: lost_bits(manifest.narrowing),
        })
    }

    fn load_checkpoint(
        &self,
        open: &OpenCheckpoint<'_>,
        options: &LoadOptions,
        tiling: &dyn RecordTiling,
        progress: &dyn Progress,
    ) -> Result<LoadedModel, LoadError> {
        let (encoding, quantizer) = match options.experts {
            ExpertsMode::F16 => (ExpertEncoding::F16, None),
            ExpertsMode::Qpacked { block, quantizer } => (
                ExpertEncoding::Qpacked {
                    block: block.unwrap_or(DEFAULT_BLOCK),
                },
                Some(quantizer.unwrap_or(DEFAULT_QUANTIZER)),
            ),
        };
        let (dtypes, bytes) = self.checkpoint_types(open, quantizer.is_some())?;
        progress.begin(
            if quantizer.is_some() {
                "packing in memory"
            } else {
                "loading"
            },
            bytes,
        );
        let reader = CheckpointReader {
            source: self,
            open,
            quantizer,
            scratch: ScratchPool::default(),
            losses: Mutex::default(),
            progress,
        };
        let dense = DenseStore::load_as(&self.spec, options.dense, &reader)?;
        let layout = RecordLayout::new(&self.spec, encoding);
        let image = layout
            .as_ref()
            .map(|l| ExpertImage::load(&self.spec, l, tiling, &reader))
            .transpose()?;
        let mut narrowing = dense.narrowing();
        if let Some(image) = &image {
            narrowing += image.narrowing();
        }
        let losses = reader.losses.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(LoadedModel {
            spec: Arc::clone(&self.spec),
            dense: Arc::new(dense),
            image: image.map(Arc::new),
            layout,
            encoding,
            quantizer,
            dtypes,
            narrowing,
            quantization_error: if quantizer.is_some() {
                layer_errors(losses)
            } else {
                Vec::new()
            },
            notes: self.notes.clone(),
            details: lost_bits(narrowing),
        })
    }

    /// The element types of the tensors that will be read, and the bytes of all of them.
    pub(crate) fn checkpoint_types(
        &self,
        open: &OpenCheckpoint<'_>,
        quantized: bool,
    ) -> Result<(DTypeRecord, u64), CheckpointError> {
        let (mut all, mut routed, mut bytes) = (Vec::new(), Vec::new(), 0);
        let checkpoint = open.checkpoint();
        for (role, shape) in dense_tensors(&self.spec) {
            let t = checkpoint.tensor(&self.dense_name(role), &shape)?;
            all.push(t.dtype);
            bytes += t.bytes();
        }
        for role in expert_tensors(&self.spec) {
            let t = checkpoint.tensor(&self.expert_name(role), &expert_shape(&self.spec, role.matrix))?;
            all.push(t.dtype);
            if quantized {
                routed.push(t.dtype);
            }
            bytes += t.bytes();
        }
        Ok((DTypeRecord::v1(all, routed), bytes))
    }
}

/// Refuses options that contradict how the artifact was packed.
fn check_settings(artifact: &Artifact, options: &LoadOptions) -> Result<(), LoadError> {
    let place = || artifact.dir().display().to_string();
    let packed = artifact.manifest().quantizer;
    let ExpertsMode::Qpacked { block, quantizer } = options.experts else {
        return Err(LoadError::NoF16Experts { place: place() });
    };
    if let Some(asked) = block.filter(|b| *b != packed.block) {
        return Err(LoadError::OtherSettings {
            place: place(),
            flag: "--block",
            asked: asked.to_string(),
            found: packed.block.to_string(),
        });
    }
    if let Some(asked) = quantizer.filter(|q| *q != packed.method) {
        return Err(LoadError::OtherSettings {
            place: place(),
            flag: "--quantizer",
            asked: asked.to_string(),
            found: packed.method.to_string(),
        });
    }
    Ok(())
}

/// Says how many values lost bits when they were narrowed to FP16.
fn lost_bits(narrowing: NarrowingReport) -> Vec<String> {
    if narrowing.inexact == 0 {
        return Vec::new();
    }
    vec![format!(
        "{} of {} weights lost bits when narrowed to FP16",
        narrowing.inexact, narrowing.values
    )]
}

/// Sums of each layer, experts and matrices in order, whatever order they were found in.
pub(crate) fn layer_errors(mut losses: Vec<(ExpertRole, QuantizationError)>) -> Vec<LayerError> {
    losses.sort_by_key(|(role, _)| *role);
    losses
        .chunk_by(|(a, _), (b, _)| a.layer == b.layer)
        .map(|layer| {
            let mut sum = QuantizationError::default();
            layer.iter().for_each(|(_, loss)| sum += *loss);
            LayerError {
                layer: layer[0].0.layer,
                squared_error: sum.squared_error,
                squared_norm: sum.squared_norm,
            }
        })
        .collect()
}
