//! A checkpoint's tensors on their way to FP16 or `qpacked`, a piece at a time.
//!
//! Pieces are small enough to stay in a core's own cache between reading, widening, quantizing and hashing, so
//! memory does not grow with the tensor.

use std::path::PathBuf;
use std::sync::Mutex;

use half::f16;
use horizon_core::artifact::digest::Summer;
use horizon_core::dtype::{DType, NarrowingReport, NotRepresentable, narrow, widen};
use horizon_core::qpacked::{QpackedLayout, QuantizationError, QuantizeError, Quantizer, quantize};
use thiserror::Error;

use crate::checkpoint::{CheckpointError, CheckpointTensor, OpenCheckpoint};

/// Values handled at a time: 256 KiB as FP32. Whole rows are; so this is part of the order in which a matrix's
/// quantization error is summed, and changing it changes the last bits of those figures in a manifest.
const PIECE_VALUES: usize = 1 << 16;

/// A tensor that could not be narrowed or quantized.
#[derive(Debug, Error)]
pub enum TransformError {
    /// It could not be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A value that FP16 cannot hold.
    #[error(
        "{}: tensor {tensor}, element {index}: {value} cannot be held in FP16 (largest magnitude 65504), \
         in which non-routed weights are executed",
        path.display()
    )]
    NotRepresentable {
        /// File.
        path: PathBuf,
        /// Tensor.
        tensor: String,
        /// Position, row-major.
        index: u64,
        /// The value.
        value: f32,
    },
    /// A block that cannot be quantized.
    #[error("{}: {source}", path.display())]
    Quantize {
        /// File.
        path: PathBuf,
        /// Tensor, row, block and reason.
        source: QuantizeError,
    },
}

/// Buffers for one thread, kept between tensors.
#[derive(Default)]
pub struct Scratch {
    bytes: Vec<u8>,
    wide: Vec<f32>,
    narrow: Vec<f16>,
    codes: Vec<u8>,
}

/// Buffers lent to whichever thread needs them.
#[derive(Default)]
pub struct ScratchPool(Mutex<Vec<Scratch>>);

impl ScratchPool {
    /// Runs `work` with buffers that no other thread uses meanwhile.
    pub fn with<T>(&self, work: impl FnOnce(&mut Scratch) -> T) -> T {
        // A panic elsewhere cannot leave a list of buffers in a bad state.
        let lock = || self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut scratch = lock().pop().unwrap_or_default();
        let result = work(&mut scratch);
        lock().push(scratch);
        result
    }
}

/// Narrows `tensor` to FP16 and hands it on in pieces, in order, with the position of each.
///
/// # Errors
/// [`TransformError`] naming file, tensor and element, or the error of `sink`.
pub fn narrow_tensor<E: From<TransformError>>(
    source: &OpenCheckpoint<'_>,
    tensor: &CheckpointTensor<'_>,
    scratch: &mut Scratch,
    mut sum: Option<&mut Summer>,
    mut sink: impl FnMut(usize, &[f16]) -> Result<(), E>,
) -> Result<NarrowingReport, E> {
    let size = tensor.dtype.size();
    let mut report = NarrowingReport::default();
    let mut at = 0;
    while at < tensor.bytes() {
        let n = usize::try_from(tensor.bytes() - at).map_or(PIECE_VALUES, |b| (b / size).min(PIECE_VALUES));
        let bytes = resized(&mut scratch.bytes, n * size);
        source.read(tensor, at, bytes).map_err(TransformError::from)?;
        if let Some(sum) = sum.as_deref_mut() {
            sum.update(bytes);
        }
        let first = at / size as u64;
        let out = resized(&mut scratch.narrow, n);
        report += narrow_piece(tensor.dtype, bytes, resized(&mut scratch.wide, n), out).map_err(|e| {
            TransformError::NotRepresentable {
                path: source.checkpoint().path_of(tensor),
                tensor: tensor.name.to_owned(),
                index: first + e.index as u64,
                value: e.value,
            }
        })?;
        sink(usize::try_from(first).expect("a tensor that fits in memory"), out)?;
        at += (n * size) as u64;
    }
    Ok(report)
}

fn narrow_piece(
    dtype: DType,
    bytes: &[u8],
    wide: &mut [f32],
    out: &mut [f16],
) -> Result<NarrowingReport, NotRepresentable> {
    widen(dtype, bytes, wide);
    narrow(wide, out)
}

/// Quantizes the matrix `tensor` and hands it on in groups of whole rows, in order: codes and scales.
///
/// # Errors
/// [`TransformError`] naming file, tensor, row and block, or the error of `sink`.
///
/// # Panics
/// When `layout` is not the shape of `tensor`.
pub fn quantize_tensor<E: From<TransformError>>(
    source: &OpenCheckpoint<'_>,
    tensor: &CheckpointTensor<'_>,
    layout: &QpackedLayout,
    quantizer: Quantizer,
    scratch: &mut Scratch,
    mut sum: Option<&mut Summer>,
    mut sink: impl FnMut(&[u8], &[f16]) -> Result<(), E>,
) -> Result<QuantizationError, E> {
    let row = layout.cols * tensor.dtype.size();
    assert_eq!(
        tensor.bytes(),
        (layout.rows * row) as u64,
        "layout of {}",
        tensor.name
    );
    let most = (PIECE_VALUES / layout.cols).max(1);
    let mut loss = QuantizationError::default();
    for first in (0..layout.rows).step_by(most) {
        let piece = QpackedLayout {
            rows: most.min(layout.rows - first),
            ..*layout
        };
        let values = piece.rows * piece.cols;
        let bytes = resized(&mut scratch.bytes, piece.rows * row);
        source
            .read(tensor, (first * row) as u64, bytes)
            .map_err(TransformError::from)?;
        if let Some(sum) = sum.as_deref_mut() {
            sum.update(bytes);
        }
        let wide = resized(&mut scratch.wide, values);
        widen(tensor.dtype, bytes, wide);
        let codes = resized(&mut scratch.codes, piece.code_bytes());
        let scales = resized(&mut scratch.narrow, piece.scales());
        loss += quantize(tensor.name, wide, &piece, quantizer, codes, scales).map_err(|mut e| {
            e.row += first;
            TransformError::Quantize {
                path: source.checkpoint().path_of(tensor),
                source: e,
            }
        })?;
        sink(codes, scales)?;
    }
    Ok(loss)
}

fn resized<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

/// FP16 values as a file has them. Files are little-endian, and weights are used as they were read.
pub fn le_bytes(values: &[f16]) -> &[u8] {
    const {
        assert!(
            cfg!(target_endian = "little"),
            "weights are read in place: not for big-endian machines"
        );
    };
    bytemuck::cast_slice(values)
}

/// The bytes behind FP16 values, to be filled from a file.
pub fn le_bytes_mut(values: &mut [f16]) -> &mut [u8] {
    const {
        assert!(
            cfg!(target_endian = "little"),
            "weights are read in place: not for big-endian machines"
        );
    };
    bytemuck::cast_slice_mut(values)
}
