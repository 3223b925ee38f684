//! The same bits as `reference.rs`, sooner. Plain Rust over fixed-size arrays, which the compiler turns into
//! vector instructions; `dispatch.rs` compiles it once for each instruction set.
//!
//! A block is padded with zeros to whole [`LANES`]: a zero changes neither the extreme nor an error, and its
//! code (8, that is q = 0) is what an odd row's last high nibble must hold.
//!
//! `mse` works in two stages. [`estimate`] computes the error of all candidates in FP32, with a reciprocal in
//! place of the division; what that can be wrong by is bounded ([`survivors_limit`]). Candidates that the bound
//! rules out are dropped, and only if more than one is left does the reference's exact sum decide among them.

use half::f16;

use super::BlockSize;
use super::dequantize::BlockDequantizer;
use super::quantize::{BlockQuantizer, ErrorSums, PARTIAL_SUMS, QuantizeErrorKind, Quantizer};
use super::reference::{FACTORS, dequantize_block, squared_error};

/// Values handled together: one AVX-512 register, two of AVX2.
pub(super) const LANES: usize = PARTIAL_SUMS;
const MAX_BLOCK: usize = BlockSize::B256.get();
const CANDIDATES: usize = 2 * FACTORS.len();
/// Candidates estimated side by side; the few that are left over are estimated along the block.
const GROUPED: usize = CANDIDATES / 64 * 64;

/// 1.5 · 2^23. Adding it to a value below 2^22 rounds that value to an integer, ties to even, and leaves the
/// integer in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// 2^-14, the smallest normal FP16 value.
const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;

/// The fast quantizer. `FMA`: whether fused multiply-add is one instruction. `GROUP`: candidates whose sums,
/// scales and reciprocals fit the registers.
pub(super) struct FastQuantizer<const FMA: bool, const GROUP: usize>(pub Quantizer);

impl<const FMA: bool, const GROUP: usize> BlockQuantizer for FastQuantizer<FMA, GROUP> {
    #[inline(always)]
    fn quantize(
        &self,
        weights: &[f32],
        codes: &mut [u8],
        scale: &mut f16,
        sums: &mut ErrorSums,
    ) -> Result<(), QuantizeErrorKind> {
        let len = weights.len().next_multiple_of(LANES);
        let (mut padded, mut packed) = ([0.0; MAX_BLOCK], [0; MAX_BLOCK / 2]);
        let whole = len == weights.len();
        let (whole_weights, whole_codes) = if whole {
            (weights, &mut *codes)
        } else {
            padded[..weights.len()].copy_from_slice(weights);
            (&padded[..len], &mut packed[..len / 2])
        };
        quantize_block::<FMA, GROUP>(whole_weights, self.0, whole_codes, scale, sums)?;
        if !whole {
            codes.copy_from_slice(&packed[..codes.len()]);
        }
        Ok(())
    }
}

/// Quantizes one block of whole lanes.
#[inline(always)]
fn quantize_block<const FMA: bool, const GROUP: usize>(
    weights: &[f32],
    quantizer: Quantizer,
    codes: &mut [u8],
    scale: &mut f16,
    sums: &mut ErrorSums,
) -> Result<(), QuantizeErrorKind> {
    let extreme = signed_extreme(weights)?;
    let absmax = round_to_f16(extreme / -8.0);
    if absmax.is_infinite() {
        return Err(QuantizeErrorKind::ScaleOverflow);
    }
    let d = match quantizer {
        Quantizer::Absmax => absmax,
        Quantizer::Mse => least_squared_error::<FMA, GROUP>(weights, extreme),
    };
    *scale = f16::from_f32(d + 0.0); // exact; the sum makes +0 of −0
    if d == 0.0 {
        encode_zeros(weights, codes, sums);
    } else {
        encode(weights, d, codes, sums);
    }
    Ok(())
}

/// The value of largest magnitude, the first one on a tie. As integers, the largest positive float is the
/// signed maximum, and the negative one of largest magnitude is the unsigned maximum.
#[inline(always)]
fn signed_extreme(weights: &[f32]) -> Result<f32, QuantizeErrorKind> {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    let (mut positive, mut unsigned) = (0, 0);
    for w in weights {
        positive = w.to_bits().cast_signed().max(positive);
        unsigned = w.to_bits().max(unsigned);
    }
    let positive = positive.cast_unsigned();
    let negative = if unsigned >> 31 == 1 {
        unsigned & 0x7fff_ffff
    } else {
        0
    };
    if positive.max(negative) >= INFINITY {
        return Err(QuantizeErrorKind::NonFinite);
    }
    let (positive, negative) = (f32::from_bits(positive), f32::from_bits(negative));
    let extreme = if positive > negative {
        positive
    } else if negative > positive {
        -negative
    } else {
        weights
            .iter()
            .copied()
            .find(|w| w.abs() == positive)
            .unwrap_or(0.0)
    };
    Ok(extreme)
}

/// `x` rounded to FP16, ties to even, as FP32; infinite from 65520 on. Branch-free, unlike a conversion.
#[inline(always)]
fn round_to_f16(x: f32) -> f32 {
    let magnitude = x.abs();
    let bits = magnitude.to_bits();
    // FP16 keeps 10 of the 23 bits of the significand.
    let normal = f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff);
    // FP16 subnormals are the multiples of 2^-24, which is the distance of FP32 values from 0.5 to 1.
    let subnormal = (magnitude + 0.5) - 0.5;
    let rounded = if magnitude < SMALLEST_NORMAL {
        subnormal
    } else {
        normal
    };
    let rounded = if rounded >= 65536.0 {
        f32::INFINITY
    } else {
        rounded
    };
    rounded.copysign(x)
}

/// `a * b + c`, with one rounding or two.
#[inline(always)]
fn multiply_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `f32::clamp` without its care for NaN, which costs instructions.
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x > high { high } else { x };
    if x < low { low } else { x }
}

/// Codes under scale `d`, which is not 0.
#[inline(always)]
fn encode(weights: &[f32], d: f32, codes: &mut [u8], sums: &mut ErrorSums) {
    let ErrorSums {
        mut squared_error,
        mut squared_norm,
    } = *sums;
    let mut nibbles = [0u8; MAX_BLOCK];
    for (w, nibbles) in weights
        .as_chunks::<LANES>()
        .0
        .iter()
        .zip(nibbles.as_chunks_mut::<LANES>().0)
    {
        for l in 0..LANES {
            // Clamping first is the same, the bounds being integers; + 8 makes the stored code.
            let sum = clamp(w[l] / d, -8.0, 7.0) + (ROUND + 8.0);
            nibbles[l] = (sum.to_bits() & 0xf) as u8;
            let wide = f64::from(w[l]);
            let difference = wide - f64::from(d * (sum - (ROUND + 8.0)));
            squared_error[l] += difference * difference;
            squared_norm[l] += wide * wide;
        }
    }
    *sums = ErrorSums {
        squared_error,
        squared_norm,
    };
    for (byte, pair) in codes.iter_mut().zip(nibbles.as_chunks::<2>().0) {
        let pair = u16::from_le_bytes(*pair);
        *byte = (pair | pair >> 4) as u8;
    }
}

/// Codes under scale 0.
#[inline(always)]
fn encode_zeros(weights: &[f32], codes: &mut [u8], sums: &mut ErrorSums) {
    for w in weights.as_chunks::<LANES>().0 {
        let sums = sums.squared_error.iter_mut().zip(&mut sums.squared_norm);
        for (w, (error, norm)) in w.iter().zip(sums) {
            let square = f64::from(*w) * f64::from(*w);
            *error += square;
            *norm += square;
        }
    }
    codes.fill(0x88);
}

/// The scale that `mse` chooses.
#[inline(always)]
fn least_squared_error<const FMA: bool, const GROUP: usize>(weights: &[f32], extreme: f32) -> f32 {
    let (mut scales, mut reciprocals) = ([0f32; CANDIDATES], [0f32; CANDIDATES]);
    for (scales, base) in scales
        .as_chunks_mut::<{ FACTORS.len() }>()
        .0
        .iter_mut()
        .zip([-8.0, 7.0])
    {
        let base = extreme / base;
        for (d, factor) in scales.iter_mut().zip(FACTORS) {
            // An infinite or zero scale does not take part, except as the first candidate, which is estimated
            // with every q = 0.
            let rounded = round_to_f16(base * factor);
            *d = if rounded.is_infinite() { 0.0 } else { rounded };
        }
    }
    for i in 0..CANDIDATES {
        reciprocals[i] = if scales[i] == 0.0 { 0.0 } else { 1.0 / scales[i] };
    }
    let mut estimates = estimate::<FMA, GROUP>(weights, &scales, &reciprocals);
    for i in 1..CANDIDATES {
        estimates[i] = if scales[i] == 0.0 {
            f32::INFINITY
        } else {
            estimates[i]
        };
    }
    let limit = survivors_limit(minimum(&estimates));
    let (mut survivors, mut bits) = (0, 0);
    for i in 0..CANDIDATES {
        let survives = estimates[i] <= limit;
        survivors += u32::from(survives);
        bits |= if survives { scales[i].to_bits() } else { 0 };
    }
    // One survivor: these are its bits.
    if survivors == 1 {
        f32::from_bits(bits)
    } else {
        settle(weights, &scales, &estimates, limit)
    }
}

/// The candidate of least exact error among those whose estimate is at most `limit`, the first one on a tie.
#[inline(never)]
fn settle(weights: &[f32], scales: &[f32], estimates: &[f32], limit: f32) -> f32 {
    let mut best: Option<(f64, f32)> = None;
    for (&d, _) in scales
        .iter()
        .zip(estimates)
        .filter(|(_, estimate)| **estimate <= limit)
    {
        // Equal scales have equal errors, and the earlier one wins.
        if best.is_none_or(|(_, winner)| winner != d) {
            let error = squared_error(weights, d);
            if best.is_none_or(|(least, _)| error < least) {
                best = Some((error, d));
            }
        }
    }
    best.map_or(scales[0], |(_, d)| d)
}

#[inline(always)]
fn minimum(values: &[f32; CANDIDATES]) -> f32 {
    let mut least = [f32::INFINITY; LANES];
    for values in values.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            least[l] = if values[l] < least[l] { values[l] } else { least[l] };
        }
    }
    let rest = values.as_chunks::<LANES>().1.iter();
    least
        .iter()
        .chain(rest)
        .fold(f32::INFINITY, |least, &x| if x < least { x } else { least })
}

/// FP32 estimates of the squared error of a block under each candidate scale.
#[inline(always)]
fn estimate<const FMA: bool, const GROUP: usize>(
    weights: &[f32],
    scales: &[f32; CANDIDATES],
    reciprocals: &[f32; CANDIDATES],
) -> [f32; CANDIDATES] {
    const { assert!(GROUPED.is_multiple_of(GROUP), "whole groups") };
    let mut estimates = [0.0; CANDIDATES];
    for ((estimates, scales), reciprocals) in (estimates[..GROUPED].as_chunks_mut::<GROUP>().0.iter_mut())
        .zip(scales.as_chunks::<GROUP>().0)
        .zip(reciprocals.as_chunks::<GROUP>().0)
    {
        *estimates = estimate_group::<FMA, GROUP>(weights, scales, reciprocals);
    }
    for i in GROUPED..CANDIDATES {
        let mut sums = [0.0; LANES];
        for w in weights.as_chunks::<LANES>().0 {
            for l in 0..LANES {
                sums[l] = add_estimate::<FMA>(sums[l], w[l], scales[i], reciprocals[i]);
            }
        }
        for half in [8, 4, 2, 1] {
            for l in 0..half {
                sums[l] += sums[l + half];
            }
        }
        estimates[i] = sums[0];
    }
    estimates
}

/// A group of candidates side by side, one weight after the other.
#[inline(always)]
fn estimate_group<const FMA: bool, const GROUP: usize>(
    weights: &[f32],
    scales: &[f32; GROUP],
    reciprocals: &[f32; GROUP],
) -> [f32; GROUP] {
    let mut sums = [0.0; GROUP];
    for &w in weights {
        for i in 0..GROUP {
            sums[i] = add_estimate::<FMA>(sums[i], w, scales[i], reciprocals[i]);
        }
    }
    sums
}

#[inline(always)]
fn add_estimate<const FMA: bool>(sum: f32, w: f32, d: f32, reciprocal: f32) -> f32 {
    let rounded = clamp(
        multiply_add::<FMA>(w, reciprocal, ROUND),
        ROUND - 8.0,
        ROUND + 7.0,
    );
    let difference = multiply_add::<FMA>(-d, rounded - ROUND, w);
    multiply_add::<FMA>(difference, difference, sum)
}

/// The largest estimate that the best candidate can have when the smallest estimate is `smallest`.
///
/// An estimate differs from the exact error by less than a factor 1 ± 2^-15:
/// - w times the rounded reciprocal is within 2^-23 of w / d, relatively, and |w / d| < 8.5 where it matters
///   (beyond, clamping gives both the same q). So both q are nearest integers but for 2^-19.9, and where they
///   differ, both errors are within 2^-19.9 of half a step: the squares agree to a factor 1 ± 2^-16.9.
/// - The difference has one rounding (d · q is exact), its square and each of at most 256 additions one
///   more, 2^-24 each: together 1 ± 2^-15.9.
///
/// Squares below the smallest normal FP32 lose up to 2^-150 each, absolutely: less than 2^-142 in a block. The
/// exact error's own roundings (FP64) are far below all that. Twice the bound is used.
#[inline(always)]
fn survivors_limit(smallest: f32) -> f32 {
    const RELATIVE: f64 = 1.0 / 16384.0;
    const ABSOLUTE: f64 = f64::from_bits((1023 - 140) << 52); // 2^-140
    let limit = (f64::from(smallest) + ABSOLUTE) * ((1.0 + RELATIVE) / (1.0 - RELATIVE)) + ABSOLUTE;
    (limit as f32).next_up()
}

/// The fast dequantizer: eight values from each four bytes.
pub(super) struct FastDequantizer;

impl BlockDequantizer for FastDequantizer {
    #[inline(always)]
    fn dequantize(&self, codes: &[u8], scale: f16, out: &mut [f32]) {
        let d = scale.to_f32();
        let (octets, rest) = out.as_chunks_mut::<8>();
        let done = 4 * octets.len();
        for (word, values) in codes.as_chunks::<4>().0.iter().zip(octets) {
            let word = u32::from_le_bytes(*word);
            for (i, value) in values.iter_mut().enumerate() {
                *value = d * ((word >> (4 * i) & 0xf).cast_signed() - 8) as f32;
            }
        }
        dequantize_block(&codes[done..], scale, rest);
    }
}
