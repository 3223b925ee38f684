//! `pack`: a checkpoint to an artifact, streaming, on all cores.
//!
//! Every tensor has its place in its shard before the first byte is read, so threads take tensors one by one,
//! carry each through reading, quantizing, hashing and writing in pieces that stay in cache, and meet nowhere.
//! The result does not depend on which thread did what. There are more threads than cores, so that some compute
//! while others wait for the disk.

mod job;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use horizon_core::artifact::manifest::{
    FORMAT, LayerError, Manifest, QuantizerRecord, SourceFile, SourceIdentity, VERSION,
};
use horizon_core::artifact::writer::{ArtifactWriter, WriteError};
use horizon_core::artifact::{Digest, Progress};
use horizon_core::dtype::NarrowingReport;
use horizon_core::qpacked::{self, BlockSize, Quantizer};
use serde::Serialize;
use thiserror::Error;

use crate::checkpoint::{Checkpoint, CheckpointError, OpenCheckpoint};
use crate::source::{ModelSource, OpenError, SMALL_FILES, layer_errors};
use crate::transform::{ScratchPool, TransformError};
use job::{Context, Job, Outcome};

/// Values a scale, unless said otherwise.
pub const DEFAULT_BLOCK: BlockSize = BlockSize::B256;
/// How scales are chosen, unless said otherwise.
pub const DEFAULT_QUANTIZER: Quantizer = Quantizer::Mse;

/// How to pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackOptions {
    /// Values a scale.
    pub block: BlockSize,
    /// How scales are chosen.
    pub quantizer: Quantizer,
    /// Replace an artifact that is there already.
    pub force: bool,
    /// Threads; `None`: as the machine suggests. The result is the same for any number.
    pub threads: Option<usize>,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self {
            block: DEFAULT_BLOCK,
            quantizer: DEFAULT_QUANTIZER,
            force: false,
            threads: None,
        }
    }
}

/// What packing did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PackReport {
    /// SHA-256 of the manifest: the artifact's identity.
    pub manifest_sha256: String,
    /// Bytes of weights read.
    pub bytes_read: u64,
    /// Bytes of shards written.
    pub bytes_written: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// Shards written.
    pub shards: usize,
    /// Settings.
    pub block: BlockSize,
    /// Settings.
    pub quantizer: Quantizer,
    /// What narrowing the non-routed weights lost.
    pub narrowing: NarrowingReport,
    /// What quantization lost, by layer.
    pub quantization_error: Vec<LayerError>,
    /// What the user should know; `progress` has been told already.
    pub notes: Vec<String>,
}

/// A checkpoint that could not be packed. Nothing is left at the output.
#[derive(Debug, Error)]
pub enum PackError {
    /// It is packed already.
    #[error("{0}: this is an artifact already; pack takes the original checkpoint")]
    AlreadyPacked(String),
    /// The user stopped it.
    #[error("cancelled; nothing was written")]
    Cancelled,
    /// A file beside the weights cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A tensor cannot be narrowed or quantized.
    #[error(transparent)]
    Transform(#[from] TransformError),
    /// The artifact cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Packs `source` into the new directory `dest`, which appears complete or not at all.
///
/// # Errors
/// [`PackError`]; the output is then as it was before. `cancel`, once set, ends the work soon.
pub fn pack(
    source: &ModelSource,
    dest: &Path,
    options: &PackOptions,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<PackReport, PackError> {
    let started = Instant::now();
    let Some(checkpoint) = source.checkpoint() else {
        return Err(PackError::AlreadyPacked(source.place().display().to_string()));
    };
    let open = checkpoint.open_files()?;
    let (plan, jobs) = job::plan(source, options.block);
    let mut writer = ArtifactWriter::create(dest, options.force, plan)?;
    let mut notes: Vec<String> = [source.notes(), writer.notes()].concat();
    notes.iter().for_each(|n| progress.note(n));
    let told = writer.notes().len();
    for name in SMALL_FILES {
        if let Some(bytes) = source.file(name)? {
            writer.small_file(name, &bytes)?;
        }
    }
    let (dtypes, bytes_read) = source.checkpoint_types(&open, true)?;
    progress.begin("packing", bytes_read);
    let outcomes = run(&open, &writer, &jobs, options, progress, cancel)?;

    let mut narrowing = NarrowingReport::default();
    outcomes.iter().for_each(|o| narrowing += o.narrowing);
    let losses = outcomes.iter().filter_map(|o| o.loss).collect();
    let manifest = Manifest {
        manifest_sha256: Digest::default(),
        format: FORMAT.to_owned(),
        version: VERSION,
        model: (**source.spec()).clone(),
        quantizer: QuantizerRecord {
            qpacked_version: qpacked::FORMAT_VERSION,
            method: options.quantizer,
            block: options.block,
        },
        dtypes,
        narrowing,
        quantization_error: layer_errors(losses),
        source: identity(source, checkpoint, &outcomes),
        files: Vec::new(),
        shards: Vec::new(),
    };
    if cancel.load(Ordering::Relaxed) {
        return Err(PackError::Cancelled);
    }
    let (manifest, all) = writer.publish(manifest)?;
    for note in &all[told..] {
        progress.note(note);
        notes.push(note.clone());
    }
    Ok(PackReport {
        manifest_sha256: manifest.manifest_sha256.to_string(),
        bytes_read,
        bytes_written: manifest.shards.iter().map(|s| s.bytes).sum(),
        seconds: started.elapsed().as_secs_f64(),
        shards: manifest.shards.len(),
        block: options.block,
        quantizer: options.quantizer,
        narrowing,
        quantization_error: manifest.quantization_error,
        notes,
    })
}

/// Runs all jobs; their outcomes in the order of the jobs.
fn run(
    open: &OpenCheckpoint<'_>,
    writer: &ArtifactWriter,
    jobs: &[Job],
    options: &PackOptions,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<Vec<Outcome>, PackError> {
    let context = Context {
        open,
        writer,
        options,
        progress,
        cancel,
    };
    let scratch = ScratchPool::default();
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let results: Mutex<Vec<(usize, Result<Outcome, PackError>)>> = Mutex::default();
    let threads = options
        .threads
        .unwrap_or_else(default_threads)
        .clamp(1, jobs.len().max(1));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !failed.load(Ordering::Relaxed) {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(i) else { break };
                    let result = scratch.with(|s| context.run(job, s));
                    failed.fetch_or(result.is_err(), Ordering::Relaxed);
                    results
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push((i, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(i, _)| *i);
    results.into_iter().map(|(_, r)| r).collect()
}

/// Half again as many threads as cores, at least two more: some wait for the disk while others compute.
fn default_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    cores + (cores / 2).max(2)
}

/// Which checkpoint this is, from what was read of it anyway.
fn identity(source: &ModelSource, checkpoint: &Checkpoint, outcomes: &[Outcome]) -> SourceIdentity {
    let mut lines: Vec<&str> = outcomes.iter().map(|o| o.identity.as_str()).collect();
    lines.sort_unstable();
    let files = checkpoint.shards().iter().map(|s| SourceFile {
        name: s.name.clone(),
        bytes: s.bytes,
        header_sha256: s.header_sha256,
    });
    SourceIdentity {
        config_sha256: source.config_sha256(),
        content_sha256: Digest::of(lines.concat().as_bytes()),
        files: files.collect(),
    }
}
