//! `manifest.json`: what an artifact is, where it came from, and every byte it has.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::digest::{Checksum, Digest};
use super::error::ManifestError;
use super::{header, io, json};
use crate::dtype::{DType, NarrowingReport};
use crate::ids::LayerId;
use crate::qpacked::{self, BlockSize, Quantizer};
use crate::spec::ModelSpec;

/// Version of the artifact that is written and read.
pub const VERSION: u32 = 1;
/// Name of the format, the manifest's `format`.
pub const FORMAT: &str = "horizon-artifact";
/// The manifest's file name.
pub const MANIFEST_FILE: &str = "manifest.json";
/// The hub's index from tensor names to shards.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Largest manifest accepted, in bytes.
pub const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// Largest file beside the shards that is accepted, in bytes.
pub const MAX_SMALL_FILE_BYTES: u64 = 64 << 20;

/// How every manifest starts; the digits of its SHA-256 follow.
const OPENING: &str = "{\n  \"manifest_sha256\": \"";

/// The whole of `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// SHA-256 of the manifest's own bytes with these 64 digits replaced by `0`: the artifact's identity.
    pub manifest_sha256: Digest,
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// The model.
    pub model: ModelSpec,
    /// How routed experts were quantized.
    pub quantizer: QuantizerRecord,
    /// Element types, each by itself.
    pub dtypes: DTypeRecord,
    /// What narrowing the non-routed weights to FP16 lost.
    pub narrowing: NarrowingReport,
    /// What quantization lost, for each layer with routed experts.
    pub quantization_error: Vec<LayerError>,
    /// The checkpoint that was packed.
    pub source: SourceIdentity,
    /// Files beside the shards, by name; the manifest itself is not among them.
    pub files: Vec<FileRecord>,
    /// Shards, in order.
    pub shards: Vec<ShardRecord>,
}

/// Settings of the quantizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuantizerRecord {
    /// Version of `qpacked`.
    pub qpacked_version: u32,
    /// How scales were chosen.
    pub method: Quantizer,
    /// Values a scale.
    pub block: BlockSize,
}

/// Element types. They are never merged into one word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DTypeRecord {
    /// Of the checkpoint's tensors, each type once.
    pub checkpoint: Vec<DType>,
    /// Of the tensors that were quantized (from their exact FP32 values), each type once.
    pub quantized_source: Vec<DType>,
    /// Of the scales of the routed experts.
    pub scale: DType,
    /// Of the activations that matrix products read.
    pub activation: DType,
    /// Of accumulation.
    pub accumulation: DType,
    /// Of the non-routed weights as stored and executed.
    pub non_routed_execution: DType,
}

impl DTypeRecord {
    /// The record of version 1 for a checkpoint with these types; sorts them and drops repetitions.
    #[must_use]
    pub fn v1(mut checkpoint: Vec<DType>, mut quantized_source: Vec<DType>) -> Self {
        for list in [&mut checkpoint, &mut quantized_source] {
            list.sort_by_key(ToString::to_string);
            list.dedup();
        }
        Self {
            checkpoint,
            quantized_source,
            scale: DType::F16,
            activation: DType::F16,
            accumulation: DType::F32,
            non_routed_execution: DType::F16,
        }
    }
}

/// What quantization did to the routed experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerError {
    /// Layer.
    pub layer: LayerId,
    /// Σ (w − ŵ)² over all its experts.
    pub squared_error: f64,
    /// Σ w².
    pub squared_norm: f64,
}

impl LayerError {
    /// Root of squared error over squared norm; 0 for a layer of zeros.
    #[must_use]
    pub fn relative_rmse(&self) -> f64 {
        if self.squared_norm == 0.0 {
            0.0
        } else {
            (self.squared_error / self.squared_norm).sqrt()
        }
    }
}

/// Which checkpoint was packed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceIdentity {
    /// SHA-256 of its `config.json`.
    pub config_sha256: Digest,
    /// SHA-256 of one line for each tensor packed, sorted by name: `NAME DTYPE [d,d] XXH3-128`.
    pub content_sha256: Digest,
    /// Its weight files, by name.
    pub files: Vec<SourceFile>,
}

/// A weight file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceFile {
    /// Name.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256 of its safetensors header, length included.
    pub header_sha256: Digest,
}

/// A file of the artifact that is no shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Name.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256.
    pub sha256: Digest,
}

/// A safetensors file of the artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardRecord {
    /// Name.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// Bytes of its header, length included: where the data starts.
    pub header_bytes: u64,
    /// SHA-256 of those bytes.
    pub header_sha256: Digest,
    /// Its tensors in order of position, without gaps.
    pub tensors: Vec<TensorRecord>,
}

/// A tensor of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRecord {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256.
    pub sha256: Digest,
    /// XXH3, checked at every load.
    pub xxh3: Checksum,
}

/// `model-00001-of-000NN.safetensors`.
#[must_use]
pub fn shard_name(index: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", index + 1)
}

impl ShardRecord {
    /// The header that this record describes.
    #[must_use]
    pub fn header(&self) -> Vec<u8> {
        header::encode(
            self.tensors
                .iter()
                .map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice())),
        )
    }
}

impl Manifest {
    /// The bytes of `manifest.json`; sets [`Manifest::manifest_sha256`] on the way.
    ///
    /// # Panics
    /// When a number of the manifest is not finite.
    pub fn seal(&mut self) -> Vec<u8> {
        self.manifest_sha256 = Digest::default();
        let mut bytes = json::to_bytes(self).expect("a manifest is plain data with string keys");
        self.manifest_sha256 = Digest::of(&bytes);
        let digits = OPENING.len()..OPENING.len() + 64;
        bytes[digits].copy_from_slice(self.manifest_sha256.to_string().as_bytes());
        bytes
    }

    /// Parses and checks `manifest.json`: version, self-digest, and that nothing in it contradicts anything.
    ///
    /// # Errors
    /// [`ManifestError`] with the first thing that is wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct Outline {
            format: String,
            version: u64,
        }
        let outline: Outline = serde_json::from_slice(bytes)?;
        if outline.format != FORMAT {
            return Err(ManifestError::Foreign);
        }
        if outline.version != u64::from(VERSION) {
            return Err(ManifestError::Version(outline.version));
        }
        let digits = OPENING.len()..OPENING.len() + 64;
        if !bytes.starts_with(OPENING.as_bytes()) || bytes.len() < digits.end {
            return Err(ManifestError::Digest);
        }
        let mut blank = bytes.to_vec();
        blank[digits.clone()].fill(b'0');
        if Digest::of(&blank).to_string().as_bytes() != &bytes[digits] {
            return Err(ManifestError::Digest);
        }
        let manifest: Self = serde_json::from_slice(bytes)?;
        manifest.validate()?;
        Ok(manifest)
    }

    /// Checks everything that the reader relies on.
    ///
    /// # Errors
    /// [`ManifestError`] with the first thing that is wrong.
    pub fn validate(&self) -> Result<(), ManifestError> {
        self.model.validate()?;
        let d = &self.dtypes;
        if self.quantizer.qpacked_version != qpacked::FORMAT_VERSION {
            return Err(record(
                "quantizer",
                format!("qpacked version {}", self.quantizer.qpacked_version),
            ));
        }
        let types = (d.scale, d.activation, d.accumulation, d.non_routed_execution);
        if types != (DType::F16, DType::F16, DType::F32, DType::F16) {
            return Err(record("dtypes", "not those of artifact version 1".into()));
        }
        if !self
            .quantization_error
            .iter()
            .map(|e| e.layer)
            .eq(self.model.moe_layers())
        {
            return Err(record(
                "quantization_error",
                "not the layers with routed experts".into(),
            ));
        }
        let mut names = HashSet::from([MANIFEST_FILE]);
        for name in self
            .files
            .iter()
            .map(|f| &f.name)
            .chain(self.shards.iter().map(|s| &s.name))
        {
            if !io::is_plain_name(name) {
                return Err(record(name, "not a plain file name".into()));
            }
            if !names.insert(name) {
                return Err(record(name, "listed twice".into()));
            }
        }
        if let Some(f) = self.files.iter().find(|f| f.bytes > MAX_SMALL_FILE_BYTES) {
            return Err(record(
                &f.name,
                format!("{} bytes; at most {MAX_SMALL_FILE_BYTES} are accepted", f.bytes),
            ));
        }
        let mut sizes = self
            .files
            .iter()
            .map(|f| f.bytes)
            .chain(self.shards.iter().map(|s| s.bytes));
        if sizes.try_fold(0u64, u64::checked_add).is_none() {
            return Err(record(
                "shards",
                "their sizes add up to more than any disk holds".into(),
            ));
        }
        let mut tensors = HashSet::new();
        for shard in &self.shards {
            shard.validate()?;
            if let Some(t) = shard.tensors.iter().find(|t| !tensors.insert(t.name.as_str())) {
                return Err(record(&t.name, "listed twice".into()));
            }
        }
        Ok(())
    }
}

impl ShardRecord {
    fn validate(&self) -> Result<(), ManifestError> {
        let mut at = self.header_bytes;
        for t in &self.tensors {
            let bytes = t
                .shape
                .iter()
                .try_fold(t.dtype.size() as u64, |n, d| n.checked_mul(*d as u64))
                .filter(|n| *n == t.bytes)
                .ok_or_else(|| {
                    record(
                        &t.name,
                        format!("{} {:?} does not take {} bytes", t.dtype, t.shape, t.bytes),
                    )
                })?;
            if t.offset != at {
                return Err(record(
                    &t.name,
                    format!("at byte {} of {}, expected {at}", t.offset, self.name),
                ));
            }
            at = at
                .checked_add(bytes)
                .filter(|end| *end <= self.bytes)
                .ok_or_else(|| {
                    record(
                        &t.name,
                        format!("ends after the {} bytes of {}", self.bytes, self.name),
                    )
                })?;
        }
        if at != self.bytes {
            return Err(record(
                &self.name,
                format!("{} bytes, but its tensors end at {at}", self.bytes),
            ));
        }
        // Only now: the inventory's sizes are sound, so the header's arithmetic is.
        let header = self.header();
        if header.len() as u64 != self.header_bytes || Digest::of(&header) != self.header_sha256 {
            return Err(record(
                &self.name,
                "the inventory does not give the header that is recorded".into(),
            ));
        }
        Ok(())
    }
}

fn record(subject: &str, problem: String) -> ManifestError {
    ManifestError::Record {
        subject: subject.to_owned(),
        problem,
    }
}
