//! The rules of `qpacked`, value by value. Slow, and meant to be read beside `docs/qpacked.md`.

use half::f16;

use super::dequantize::BlockDequantizer;
use super::quantize::{BlockQuantizer, ErrorSums, PARTIAL_SUMS, QuantizeErrorKind, Quantizer};

/// Numerators over 64 of the factors that `mse` tries on each of its two bases, in this order.
pub(super) const FACTORS: [f32; 33] = {
    let mut factors = [1.0; 33];
    let mut i = 1;
    while i < factors.len() {
        let t = if i <= 24 { -(i as f32) } else { (i - 24) as f32 };
        factors[i] = (64.0 + t) / 64.0;
        i += 1;
    }
    factors
};

/// The quantizer as the rules are written.
pub(super) struct ReferenceQuantizer(pub Quantizer);

impl BlockQuantizer for ReferenceQuantizer {
    fn quantize(
        &self,
        weights: &[f32],
        codes: &mut [u8],
        scale: &mut f16,
        sums: &mut ErrorSums,
    ) -> Result<(), QuantizeErrorKind> {
        quantize_block(weights, self.0, codes, scale, sums)
    }
}

/// The dequantizer that every other one must equal.
pub(super) struct ReferenceDequantizer;

impl BlockDequantizer for ReferenceDequantizer {
    fn dequantize(&self, codes: &[u8], scale: f16, out: &mut [f32]) {
        dequantize_block(codes, scale, out);
    }
}

fn quantize_block(
    weights: &[f32],
    quantizer: Quantizer,
    codes: &mut [u8],
    scale: &mut f16,
    sums: &mut ErrorSums,
) -> Result<(), QuantizeErrorKind> {
    let extreme = signed_extreme(weights)?;
    let absmax = f16::from_f32(extreme / -8.0);
    if absmax.is_infinite() {
        return Err(QuantizeErrorKind::ScaleOverflow);
    }
    let chosen = match quantizer {
        Quantizer::Absmax => absmax,
        Quantizer::Mse => least_squared_error(weights, extreme),
    };
    // A zero scale is stored as +0, whatever the sign of what underflowed.
    *scale = if chosen.to_f32() == 0.0 { f16::ZERO } else { chosen };
    let d = scale.to_f32();
    codes.fill(0x88);
    for (i, &w) in weights.iter().enumerate() {
        let q = code(w, d);
        let nibble = (q + 8.0) as u8;
        let byte = &mut codes[i / 2];
        *byte = if i % 2 == 0 {
            *byte & 0xf0 | nibble
        } else {
            *byte & 0x0f | nibble << 4
        };
        sums.squared_error[i % PARTIAL_SUMS] += squared_difference(w, d, q);
        sums.squared_norm[i % PARTIAL_SUMS] += f64::from(w) * f64::from(w);
    }
    Ok(())
}

/// The value of largest magnitude, the first one on a tie.
fn signed_extreme(weights: &[f32]) -> Result<f32, QuantizeErrorKind> {
    let mut extreme = 0.0f32;
    for &w in weights {
        if !w.is_finite() {
            return Err(QuantizeErrorKind::NonFinite);
        }
        if w.abs() > extreme.abs() {
            extreme = w;
        }
    }
    Ok(extreme)
}

/// The code of `w` under scale `d`, −8 to 7.
pub(super) fn code(w: f32, d: f32) -> f32 {
    if d == 0.0 {
        0.0
    } else {
        (w / d).round_ties_even().clamp(-8.0, 7.0)
    }
}

fn squared_difference(w: f32, d: f32, q: f32) -> f64 {
    let difference = f64::from(w) - f64::from(d * q);
    difference * difference
}

/// The squared error of a block under scale `d`: a sequential FP64 sum, in the order of the weights.
pub(super) fn squared_error(weights: &[f32], d: f32) -> f64 {
    weights
        .iter()
        .fold(0.0, |sum, &w| sum + squared_difference(w, d, code(w, d)))
}

/// The candidate of least squared error, the first one on a tie. The first candidate is the scale of `absmax`
/// and takes part even when it is zero; another one that is zero or infinite does not.
fn least_squared_error(weights: &[f32], extreme: f32) -> f16 {
    let bases = [extreme / -8.0, extreme / 7.0];
    let candidates = bases
        .into_iter()
        .flat_map(|base| FACTORS.map(|factor| f16::from_f32(base * factor)));
    let mut best = (f64::INFINITY, f16::ZERO);
    for (i, d) in candidates.enumerate() {
        if i > 0 && (d.is_infinite() || d.to_f32() == 0.0) {
            continue;
        }
        let error = squared_error(weights, d.to_f32());
        if error < best.0 {
            best = (error, d);
        }
    }
    best.1
}

/// Dequantizes one block: value `i` is `d * q`.
pub(super) fn dequantize_block(codes: &[u8], scale: f16, out: &mut [f32]) {
    let d = scale.to_f32();
    for (i, out) in out.iter_mut().enumerate() {
        let nibble = if i % 2 == 0 {
            codes[i / 2] & 0xf
        } else {
            codes[i / 2] >> 4
        };
        *out = d * (f32::from(nibble) - 8.0);
    }
}
