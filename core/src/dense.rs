//! The non-routed weights: FP16 or q8, in anonymous memory, complete before the first step.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;

use half::f16;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::dense_q8::{self, NotFinite, Q8Rows, scales_per_row};
use crate::dtype::NarrowingReport;
use crate::memory::{AnonymousMemory, align_up};
use crate::roles::{DenseRole, LayerRole, dense_tensors};
use crate::spec::ModelSpec;

/// How non-routed weights are held and executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DenseFormat {
    /// All of them FP16: the reference configuration.
    #[default]
    F16,
    /// The matrices of attention, shared experts, dense layers and the output head as [`dense_q8`], made from the
    /// FP16 values when the model is loaded; everything else FP16.
    Q8,
}

impl DenseFormat {
    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Q8 => "q8",
        }
    }

    /// How the tensor of `role` is held in a model of this format. Router, norms, biases, the shared expert's gate and
    /// the embedding table are FP16 in all.
    #[must_use]
    pub fn of(self, role: DenseRole) -> Self {
        use LayerRole as L;
        match role {
            DenseRole::OutputHead
            | DenseRole::Layer(
                _,
                L::Query
                | L::Key
                | L::Value
                | L::Output
                | L::SharedGate
                | L::SharedUp
                | L::SharedDown
                | L::DenseGate
                | L::DenseUp
                | L::DenseDown,
            ) => self,
            DenseRole::Embedding | DenseRole::FinalNorm | DenseRole::Layer(..) => Self::F16,
        }
    }
}

impl fmt::Display for DenseFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A non-routed tensor as it is held in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldTensor {
    /// What it is.
    pub role: DenseRole,
    /// `[out, in]`, or one dimension.
    pub shape: Vec<usize>,
    /// How it is held.
    pub format: DenseFormat,
}

impl HeldTensor {
    /// Number of values.
    #[must_use]
    pub fn values(&self) -> usize {
        self.shape.iter().product()
    }

    /// Values a row.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Bytes of its values, or of its codes and its scales, without alignment.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        self.parts().iter().sum()
    }

    /// The same with each part aligned, as [`DenseStore`] holds them.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.parts().map(align_up).iter().sum()
    }

    /// Bytes of values or codes, bytes of scales.
    fn parts(&self) -> [usize; 2] {
        match self.format {
            DenseFormat::F16 => [self.values() * size_of::<f16>(), 0],
            DenseFormat::Q8 => [
                self.values(),
                self.values() / self.cols() * scales_per_row(self.cols()) * size_of::<f16>(),
            ],
        }
    }
}

/// Every non-routed tensor that a model of `spec` holds in `format`. With tied embeddings and q8 the output head is
/// one of them: a copy of the embedding table, which stays FP16.
#[must_use]
pub fn held_tensors(spec: &ModelSpec, format: DenseFormat) -> Vec<HeldTensor> {
    let mut tensors: Vec<HeldTensor> = dense_tensors(spec)
        .into_iter()
        .map(|(role, shape)| HeldTensor {
            role,
            shape,
            format: format.of(role),
        })
        .collect();
    if spec.tied_embeddings && format == DenseFormat::Q8 {
        tensors.push(HeldTensor {
            role: DenseRole::OutputHead,
            shape: vec![spec.vocab, spec.hidden],
            format,
        });
    }
    tensors
}

/// Most bytes that [`DenseStore::load_as`] holds beside the store while it loads with `threads` threads: the FP16
/// values of a tensor that is being converted, one a thread.
#[must_use]
pub fn conversion_bytes(spec: &ModelSpec, format: DenseFormat, threads: usize) -> usize {
    let mut bytes: Vec<usize> = held_tensors(spec, format)
        .iter()
        .filter(|t| t.format == DenseFormat::Q8 && !is_copy(spec, t.role))
        .map(|t| t.values() * size_of::<f16>())
        .collect();
    bytes.sort_unstable_by_key(|b| std::cmp::Reverse(*b));
    bytes.iter().take(threads).sum()
}

/// Whether a tensor is made from another that is held too: the head from the embedding table.
fn is_copy(spec: &ModelSpec, role: DenseRole) -> bool {
    spec.tied_embeddings && role == DenseRole::OutputHead
}

/// A matrix of a model, as it is held.
#[derive(Clone, Copy, Debug)]
pub enum DenseMatrix<'a> {
    /// FP16 values.
    F16 {
        /// `[rows][cols]`
        values: &'a [f16],
        /// Values a row.
        cols: usize,
    },
    /// Codes and scales.
    Q8(Q8Rows<'a>),
}

impl<'a> DenseMatrix<'a> {
    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self {
            Self::F16 { values, cols } => values.len() / cols,
            Self::Q8(rows) => rows.rows(),
        }
    }

    /// Values a row.
    #[must_use]
    pub fn cols(&self) -> usize {
        match self {
            Self::F16 { cols, .. } => *cols,
            Self::Q8(rows) => rows.cols,
        }
    }

    /// Rows `range` only.
    ///
    /// # Panics
    /// When there are fewer.
    #[must_use]
    pub fn range(&self, range: Range<usize>) -> DenseMatrix<'a> {
        match self {
            Self::F16 { values, cols } => Self::F16 {
                values: &values[range.start * cols..range.end * cols],
                cols: *cols,
            },
            Self::Q8(rows) => Self::Q8(rows.range(range)),
        }
    }
}

/// All non-routed tensors of a model.
#[derive(Debug)]
pub struct DenseStore {
    memory: AnonymousMemory,
    format: DenseFormat,
    places: BTreeMap<DenseRole, Place>,
    head: DenseRole,
    narrowing: NarrowingReport,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
struct Place {
    format: DenseFormat,
    cols: usize,
    /// Values or codes.
    values: Range<usize>,
    /// Empty in FP16.
    scales: Range<usize>,
}

/// Where non-routed tensors come from: an artifact, or a checkpoint narrowed on the way.
pub trait DenseSource: Sync {
    /// Fills `out` with the tensor of `role`, whose shape is `shape`.
    ///
    /// # Errors
    /// What could not be read, named.
    fn read(&self, role: DenseRole, shape: &[usize], out: &mut [f16])
    -> Result<NarrowingReport, SourceError>;
}

/// A tensor that could not be supplied.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct SourceError(#[source] pub Box<dyn std::error::Error + Send + Sync>);

/// Weights that could not be brought into memory.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The system refused the memory.
    #[error("cannot reserve {bytes} bytes of host memory for {what}: {source}")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// How much.
        bytes: usize,
        /// Why.
        source: io::Error,
    },
    /// A tensor could not be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A tensor has no q8 form.
    #[error("--dense q8: {role:?}: {source}; --dense f16 takes the weights as they are")]
    NoQ8 {
        /// Which.
        role: DenseRole,
        /// Where in it, and what.
        source: NotFinite,
    },
}

impl DenseStore {
    /// Reads every tensor that `spec` asks for, as FP16, on all threads of the current pool.
    ///
    /// # Errors
    /// [`LoadError`] of the first tensor that fails.
    pub fn load(spec: &ModelSpec, source: &dyn DenseSource) -> Result<Self, LoadError> {
        Self::load_as(spec, DenseFormat::F16, source)
    }

    /// The same in a given format. FP16 values of converted tensors are not kept.
    ///
    /// # Errors
    /// [`LoadError`] of the first tensor that fails.
    pub fn load_as(
        spec: &ModelSpec,
        format: DenseFormat,
        source: &dyn DenseSource,
    ) -> Result<Self, LoadError> {
        let mut tensors = held_tensors(spec, format);
        // A copy comes last, so that what it is made from lies before it. Else largest first: the last thread to
        // finish then holds a small tensor.
        tensors.sort_by_key(|t| (is_copy(spec, t.role), std::cmp::Reverse(t.values()), t.role));
        let bytes = tensors.iter().map(HeldTensor::held_bytes).sum();
        let mut memory = reserve(bytes, "the non-routed weights")?;
        let mut places = BTreeMap::new();
        let mut jobs = Vec::with_capacity(tensors.len());
        let (mut rest, mut at) = (memory.bytes_mut(), 0);
        for tensor in tensors.iter().filter(|t| !is_copy(spec, t.role)) {
            let place = Place::new(tensor, at);
            let (mine, others) = rest.split_at_mut(tensor.held_bytes());
            jobs.push((tensor, place.clone().of_own(at), mine));
            (rest, at) = (others, at + tensor.held_bytes());
            places.insert(tensor.role, place);
        }
        let narrowing = jobs
            .into_par_iter()
            .with_max_len(1)
            .map(|(tensor, place, out)| read(tensor, &place, out, source))
            .try_reduce(NarrowingReport::default, |mut a, b| {
                a += b;
                Ok(a)
            })?;
        for tensor in tensors.iter().filter(|t| is_copy(spec, t.role)) {
            let place = Place::new(tensor, at);
            let (before, mine) = memory.bytes_mut().split_at_mut(at);
            let from = &before[places[&DenseRole::Embedding].values.clone()];
            let own = place.clone().of_own(at);
            let (codes, scales) = own.q8_parts(mine);
            dense_q8::quantize_on_all_threads(bytemuck::cast_slice(from), own.cols, codes, scales)
                .map_err(|source| no_q8(tensor, source))?;
            places.insert(tensor.role, place);
        }
        let head = if places.contains_key(&DenseRole::OutputHead) {
            DenseRole::OutputHead
        } else {
            DenseRole::Embedding
        };
        Ok(Self {
            memory,
            format,
            places,
            head,
            narrowing,
        })
    }

    /// How the weights are held.
    #[must_use]
    pub fn format(&self) -> DenseFormat {
        self.format
    }

    /// The FP16 tensor of `role`; `None` if the model does not have it, or holds it as q8.
    #[must_use]
    pub fn get(&self, role: DenseRole) -> Option<&[f16]> {
        let place = self.places.get(&role).filter(|p| p.format == DenseFormat::F16)?;
        Some(bytemuck::cast_slice(&self.memory.bytes()[place.values.clone()]))
    }

    /// The matrix of `role` as it is held, if the model has it; a tensor of one dimension is one row.
    #[must_use]
    pub fn matrix(&self, role: DenseRole) -> Option<DenseMatrix<'_>> {
        let place = self.places.get(&role)?;
        let bytes = self.memory.bytes();
        let values = &bytes[place.values.clone()];
        Some(match place.format {
            DenseFormat::F16 => DenseMatrix::F16 {
                values: bytemuck::cast_slice(values),
                cols: place.cols,
            },
            DenseFormat::Q8 => DenseMatrix::Q8(Q8Rows {
                codes: bytemuck::cast_slice(values),
                scales: bytemuck::cast_slice(&bytes[place.scales.clone()]),
                cols: place.cols,
            }),
        })
    }

    /// The role that the output head is found under: its own, or the embedding table's where they are one tensor.
    #[must_use]
    pub fn head_role(&self) -> DenseRole {
        self.head
    }

    /// Bytes held, alignment included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// What narrowing the checkpoint to FP16 lost.
    #[must_use]
    pub fn narrowing(&self) -> NarrowingReport {
        self.narrowing
    }
}

impl Place {
    /// The place of `tensor` from byte `at` on.
    fn new(tensor: &HeldTensor, at: usize) -> Self {
        let [values, scales] = tensor.parts();
        let scales_at = at + align_up(values);
        Self {
            format: tensor.format,
            cols: tensor.cols(),
            values: at..at + values,
            scales: scales_at..scales_at + scales,
        }
    }

    /// The same within the tensor's own bytes, which start at `at`.
    fn of_own(mut self, at: usize) -> Self {
        for range in [&mut self.values, &mut self.scales] {
            *range = range.start - at..range.end - at;
        }
        self
    }

    /// Codes and scales within the tensor's own bytes.
    fn q8_parts<'a>(&self, own: &'a mut [u8]) -> (&'a mut [i8], &'a mut [f16]) {
        let (values, scales) = own.split_at_mut(self.scales.start);
        (
            bytemuck::cast_slice_mut(&mut values[self.values.clone()]),
            bytemuck::cast_slice_mut(&mut scales[..self.scales.len()]),
        )
    }
}

/// Reads a tensor into its own bytes, converting it if it is not held as FP16.
fn read(
    tensor: &HeldTensor,
    place: &Place,
    out: &mut [u8],
    source: &dyn DenseSource,
) -> Result<NarrowingReport, LoadError> {
    match tensor.format {
        DenseFormat::F16 => {
            let out = bytemuck::cast_slice_mut(&mut out[place.values.clone()]);
            Ok(source.read(tensor.role, &tensor.shape, out)?)
        }
        DenseFormat::Q8 => {
            let mut wide = reserve(tensor.values() * size_of::<f16>(), "a tensor on its way to q8")?;
            let halves = bytemuck::cast_slice_mut(wide.bytes_mut());
            let report = source.read(tensor.role, &tensor.shape, halves)?;
            let (codes, scales) = place.q8_parts(out);
            dense_q8::quantize(halves, place.cols, codes, scales).map_err(|source| no_q8(tensor, source))?;
            Ok(report)
        }
    }
}

fn no_q8(tensor: &HeldTensor, source: NotFinite) -> LoadError {
    LoadError::NoQ8 {
        role: tensor.role,
        source,
    }
}

fn reserve(bytes: usize, what: &'static str) -> Result<AnonymousMemory, LoadError> {
    AnonymousMemory::zeroed(bytes).map_err(|source| LoadError::Memory { what, bytes, source })
}
