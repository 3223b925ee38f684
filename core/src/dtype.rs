//! Storage types and conversions between them.

use std::fmt;

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use serde::{Deserialize, Serialize};

/// Type of a stored element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DType {
    /// IEEE 754 binary16.
    F16,
    /// The upper half of binary32.
    BF16,
    /// IEEE 754 binary32.
    F32,
    /// A byte: two INT4 codes.
    U8,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::F32 => "F32",
            Self::U8 => "U8",
        })
    }
}

/// What narrowing to FP16 did to a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NarrowingReport {
    /// Values seen.
    pub values: u64,
    /// Values that FP16 cannot hold exactly.
    pub inexact: u64,
}

impl std::ops::AddAssign for NarrowingReport {
    fn add_assign(&mut self, other: Self) {
        self.values += other.values;
        self.inexact += other.inexact;
    }
}

/// A value that FP16 cannot hold at all: NaN, infinity, or a magnitude that rounds above 65504.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NotRepresentable {
    /// Position in the slice.
    pub index: usize,
    /// The value.
    pub value: f32,
}

/// Values converted at a time: enough for the hardware's own conversions, few enough for the first-level cache.
const RUN: usize = 1024;

/// Reads little-endian elements of `dtype` into `out` as FP32, exactly.
///
/// # Panics
/// When `bytes` is not exactly `out.len()` elements, or `dtype` is not a floating-point type.
pub fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(
        bytes.len(),
        out.len() * dtype.size(),
        "byte length and element count disagree"
    );
    match dtype {
        DType::F16 => {
            let mut halves = [f16::ZERO; RUN];
            for (out, bytes) in out.chunks_mut(RUN).zip(bytes.chunks(2 * RUN)) {
                let halves = &mut halves[..out.len()];
                for (h, b) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *h = f16::from_le_bytes(*b);
                }
                halves.convert_to_f32_slice(out);
            }
        }
        DType::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                // The upper half of binary32, NaN patterns included.
                *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        DType::U8 => panic!("U8 is not a floating-point type"),
    }
}

/// Rounds FP32 values to FP16 (nearest, ties to even), counting those that lose bits.
///
/// # Errors
/// The first value that is not finite in FP16.
///
/// # Panics
/// When the slices differ in length.
pub fn narrow(values: &[f32], out: &mut [f16]) -> Result<NarrowingReport, NotRepresentable> {
    assert_eq!(values.len(), out.len(), "slices differ in length");
    let mut inexact = 0;
    let mut sound = true;
    let mut back = [0f32; RUN];
    for (out, values) in out.chunks_mut(RUN).zip(values.chunks(RUN)) {
        let back = &mut back[..out.len()];
        out.convert_from_f32_slice(values);
        out.convert_to_f32_slice(back);
        // A run is short enough to count in 32 bits, which keeps the vectors of the loop wide.
        let lost: u32 = back.iter().zip(values).map(|(b, v)| u32::from(b != v)).sum();
        inexact += u64::from(lost);
        sound &= back.iter().fold(true, |ok, b| ok & b.is_finite());
    }
    if !sound {
        let index = out
            .iter()
            .position(|o| !o.is_finite())
            .expect("a value was not finite");
        return Err(NotRepresentable {
            index,
            value: values[index],
        });
    }
    Ok(NarrowingReport {
        values: values.len() as u64,
        inexact,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowing_counts_lost_bits_and_refuses_overflow() {
        let mut out = [f16::ZERO; 3];
        let report = narrow(&[1.0, 2f32.powi(-26) * 3.0, -65504.0], &mut out).expect("all representable");
        assert_eq!(
            report,
            NarrowingReport {
                values: 3,
                inexact: 1
            }
        );
        let bad = narrow(&[0.0, 65520.0, f32::NAN], &mut out).expect_err("65520 rounds to infinity");
        assert_eq!((bad.index, bad.value), (1, 65520.0));
        assert!(narrow(&[f32::NAN], &mut out[..1]).is_err());
    }

    #[test]
    fn long_slices_are_converted_as_each_value_is() {
        let values: Vec<f32> = (0..2 * RUN as u32 + 77)
            .map(|i| {
                if i % 3 == 0 {
                    (i % 1000) as f32
                } else {
                    f32::from_bits(0x3300_0000 + i * 150_011) % 60_000.0
                }
            })
            .collect();
        let mut out = vec![f16::ZERO; values.len()];
        let report = narrow(&values, &mut out).expect("all below 65504");
        let one: Vec<f16> = values.iter().map(|v| f16::from_f32(*v)).collect();
        assert_eq!(out, one);
        let lost = one.iter().zip(&values).filter(|(o, v)| o.to_f32() != **v).count();
        assert_eq!(
            report,
            NarrowingReport {
                values: values.len() as u64,
                inexact: lost as u64
            }
        );
        assert!(lost > 100 && lost < values.len());
        let bytes: Vec<u8> = out.iter().flat_map(|h| h.to_le_bytes()).collect();
        let mut wide = vec![0.0; out.len()];
        widen(DType::F16, &bytes, &mut wide);
        assert!(wide.iter().zip(&out).all(|(w, h)| *w == h.to_f32()));
        let mut bad = values;
        bad[RUN + 3] = -65_520.0;
        assert_eq!(narrow(&bad, &mut out).expect_err("too large").index, RUN + 3);
    }

    #[test]
    fn widening_is_exact_for_every_bf16_and_f16_pattern() {
        for bits in 0..=u16::MAX {
            let mut o = [0f32];
            widen(DType::BF16, &bits.to_le_bytes(), &mut o);
            assert_eq!(o[0].to_bits(), u32::from(bits) << 16);
            widen(DType::F16, &bits.to_le_bytes(), &mut o);
            assert_eq!(
                f16::from_f32(o[0]).to_bits() & 0x7fff > 0x7c00,
                f16::from_bits(bits).is_nan()
            );
            if !f16::from_bits(bits).is_nan() {
                assert_eq!(f16::from_f32(o[0]).to_bits(), bits);
            }
        }
    }
}
