//! The one place where a path becomes instructions: `fast.rs` compiled for each instruction set, and the calls
//! to it. Calling code that was compiled for instructions which the CPU may lack is what is unsafe here.
#![expect(
    unsafe_code,
    reason = "calls functions compiled for instruction sets found at run time"
)]

use half::f16;

use super::dequantize::dequantize_blocks;
use super::fast::{FastDequantizer, FastQuantizer};
use super::quantize::{BadBlock, QuantizationError, Quantizer, quantize_blocks};
use super::reference::{ReferenceDequantizer, ReferenceQuantizer};
use super::{CodecPath, QpackedLayout};

/// Whether the program's own target has a fused multiply-add instruction.
const TARGET_HAS_FMA: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

/// Quantizes by `path`; the slices have been checked.
pub(super) fn quantize(
    path: CodecPath,
    weights: &[f32],
    layout: &QpackedLayout,
    quantizer: Quantizer,
    codes: &mut [u8],
    scales: &mut [f16],
) -> Result<QuantizationError, BadBlock> {
    check(path);
    match path {
        CodecPath::Scalar => quantize_blocks(&ReferenceQuantizer(quantizer), weights, layout, codes, scales),
        CodecPath::Portable => quantize_blocks(
            &FastQuantizer::<TARGET_HAS_FMA, 16>(quantizer),
            weights,
            layout,
            codes,
            scales,
        ),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `check` has found the instructions that the callee was compiled for.
        CodecPath::Avx2 => unsafe { x86::quantize_avx2(weights, layout, quantizer, codes, scales) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `check` has found the instructions that the callee was compiled for.
        CodecPath::Avx512 => unsafe { x86::quantize_avx512(weights, layout, quantizer, codes, scales) },
        #[cfg(not(target_arch = "x86_64"))]
        CodecPath::Avx2 | CodecPath::Avx512 => unreachable!("`check` lets no x86 path pass"),
    }
}

/// Dequantizes by `path`; the slices have been checked.
pub(super) fn dequantize(
    path: CodecPath,
    layout: &QpackedLayout,
    codes: &[u8],
    scales: &[f16],
    out: &mut [f32],
) {
    check(path);
    match path {
        CodecPath::Scalar => {
            dequantize_blocks(&ReferenceDequantizer, layout, codes, scales, out);
        }
        CodecPath::Portable => dequantize_blocks(&FastDequantizer, layout, codes, scales, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `check` has found the instructions that the callee was compiled for.
        CodecPath::Avx2 => unsafe { x86::dequantize_avx2(layout, codes, scales, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `check` has found the instructions that the callee was compiled for.
        CodecPath::Avx512 => unsafe { x86::dequantize_avx512(layout, codes, scales, out) },
        #[cfg(not(target_arch = "x86_64"))]
        CodecPath::Avx2 | CodecPath::Avx512 => unreachable!("`check` lets no x86 path pass"),
    }
}

fn check(path: CodecPath) {
    assert!(
        path.is_available(),
        "this CPU lacks the instructions of the path {path}"
    );
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;

    macro_rules! instantiate {
        ($features:literal, $group:literal, $quantize:ident, $dequantize:ident) => {
            #[target_feature(enable = $features)]
            pub(super) fn $quantize(
                weights: &[f32],
                layout: &QpackedLayout,
                quantizer: Quantizer,
                codes: &mut [u8],
                scales: &mut [f16],
            ) -> Result<QuantizationError, BadBlock> {
                quantize_blocks(
                    &FastQuantizer::<true, $group>(quantizer),
                    weights,
                    layout,
                    codes,
                    scales,
                )
            }

            #[target_feature(enable = $features)]
            pub(super) fn $dequantize(layout: &QpackedLayout, codes: &[u8], scales: &[f16], out: &mut [f32]) {
                dequantize_blocks(&FastDequantizer, layout, codes, scales, out);
            }
        };
    }

    // The group is as wide as its sums, scales and reciprocals fit 16 registers of 8, or 32 of 16 values.
    instantiate!("avx2,fma", 32, quantize_avx2, dequantize_avx2);
    instantiate!(
        "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma",
        64,
        quantize_avx512,
        dequantize_avx512
    );
}
