//! What holds for any finite weights of any shape.

use half::f16;
use horizon_core::qpacked::{
    BlockSize, CodecPath, QpackedLayout, QuantizationError, QuantizeErrorKind, Quantizer, dequantize,
    dequantize_with, quantize,
};
use proptest::prelude::*;

use crate::support::{Packed, bits};

/// 2^-14, the smallest normal FP16 value.
const SMALLEST_NORMAL_SCALE: f64 = 1.0 / 16384.0;

/// A generator of 64-bit values (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From −1 to 1.
    fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 8_388_608.0 - 1.0
    }
}

/// Kinds of weights. The ones from `Ternary` on make exact ties: of extremes, of quotients and of errors.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Normal,
    Uniform,
    HeavyTail,
    /// Every exponent that FP32 and a finite scale allow.
    AnyBits,
    /// Scales at and below the smallest FP16 subnormal.
    Tiny,
    /// Near 524160.
    Huge,
    Ternary,
    /// Multiples of half a step of the block's own scale.
    HalfSteps,
    MostlyZero,
    OneValue,
    Zero,
}

fn weights(kind: Kind, seed: u64, len: usize) -> Vec<f32> {
    let mut r = Random(seed);
    let gain = 2f32.powi((r.next() % 40) as i32 - 30);
    let normal = |r: &mut Random| (0..4).map(|_| r.signed()).sum::<f32>() * 0.87;
    let mut one = || match kind {
        Kind::Normal => normal(&mut r) * gain,
        Kind::Uniform => r.signed() * gain,
        Kind::HeavyTail => normal(&mut r) / (r.signed().abs() + 0.02) * gain,
        Kind::AnyBits => {
            let w = f32::from_bits(r.next() as u32);
            if w.abs() < 524_160.0 {
                w
            } else {
                f32::from_bits(w.to_bits() & 0x87ff_ffff)
            }
        }
        Kind::Tiny => r.signed() * 2f32.powi(-(18 + (r.next() % 8) as i32)),
        Kind::Huge => r.signed() * 524_159.0,
        Kind::Ternary => (r.next() % 3) as f32 * gain - gain,
        Kind::HalfSteps => ((r.next() % 33) as f32 - 16.0) * 0.5 * gain,
        Kind::MostlyZero => {
            if r.next().is_multiple_of(50) {
                r.signed() * gain
            } else {
                -0.0
            }
        }
        Kind::OneValue => -gain,
        Kind::Zero => 0.0,
    };
    (0..len).map(|_| one()).collect()
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        3 => Just(Kind::Normal), 2 => Just(Kind::Uniform), 3 => Just(Kind::HeavyTail), 2 => Just(Kind::AnyBits),
        3 => Just(Kind::Tiny), 2 => Just(Kind::Huge), 3 => Just(Kind::Ternary), 3 => Just(Kind::HalfSteps),
        2 => Just(Kind::MostlyZero), 1 => Just(Kind::OneValue), 1 => Just(Kind::Zero),
    ]
}

fn block() -> impl Strategy<Value = BlockSize> {
    proptest::sample::select(&BlockSize::ALL[..])
}

fn quantizer() -> impl Strategy<Value = Quantizer> {
    proptest::sample::select(&Quantizer::ALL[..])
}

/// The error of a block as the format's rule sums it, from the dequantized values.
fn block_error(weights: &[f32], values: &[f32]) -> f64 {
    weights
        .iter()
        .zip(values)
        .fold(0.0, |sum, (w, v)| sum + (f64::from(*w) - f64::from(*v)).powi(2))
}

/// The bound on `|w - v|` for one weight, derived in `docs/qpacked.md`: half a step where a code is near enough,
/// the distance to the last code beyond. `2^-20` steps are for the rounding of the quotient.
fn value_bound(w: f32, d: f32) -> f64 {
    let (w, step) = (f64::from(w), f64::from(d).abs());
    let along = w * f64::from(d).signum();
    let beyond = (along - 7.0 * step).max(-8.0 * step - along);
    beyond.max(step / 2.0) + step / 1_048_576.0
}

fn check_round_trip(weights: &[f32], packed: &Packed, values: &[f32], quantizer: Quantizer) {
    for (row, block, range, d) in packed.blocks() {
        assert!(
            d.is_finite() && !(d == 0.0 && d.is_sign_negative()),
            "scale {d} of row {row}, block {block}"
        );
        let extreme = weights[range.clone()]
            .iter()
            .fold(0.0, |e: f32, w| if w.abs() > e.abs() { *w } else { e });
        let step = f64::from(d).abs();
        for i in range {
            let (w, v) = (weights[i], values[i]);
            let error = (f64::from(w) - f64::from(v)).abs();
            assert!(error <= value_bound(w, d), "{w} became {v} with scale {d}");
            if quantizer == Quantizer::Absmax && step >= SMALLEST_NORMAL_SCALE {
                // Only a value of the sign opposite to the extreme's is ever clamped, by half a step more.
                let opposite = f64::from(w) / f64::from(d) > 7.5;
                assert!(!opposite || w.is_sign_positive() != extreme.is_sign_positive());
                let bound = if opposite {
                    1.0 + 1.0 / 256.0
                } else {
                    0.5 + 1.0 / 1_048_576.0
                };
                assert!(error <= bound * step, "{w} became {v} with scale {d}");
            }
        }
        if quantizer == Quantizer::Absmax && step < SMALLEST_NORMAL_SCALE {
            // |extreme / 8| is within 2^-25 of a subnormal scale.
            assert!(
                f64::from(extreme).abs() <= 8.0 * (step + 2f64.powi(-25)),
                "{extreme} with scale {d}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn a_round_trip_errs_by_half_a_step_and_every_path_agrees(
        (kind, seed, rows, cols) in (kind(), any::<u64>(), 1..5usize, 1..700usize),
        (block, quantizer) in (block(), quantizer()),
    ) {
        let weights = weights(kind, seed, rows * cols);
        let reference = Packed::quantize(CodecPath::Scalar, "w", &weights, (rows, cols), block, quantizer);
        let reference = reference.expect("finite weights below the limit");
        let values = reference.dequantize(CodecPath::Scalar);
        check_round_trip(&weights, &reference, &values, quantizer);
        for path in CodecPath::available() {
            let got = Packed::quantize(path, "w", &weights, (rows, cols), block, quantizer);
            let got = got.expect("finite weights below the limit");
            prop_assert_eq!(got.scale_bits(), reference.scale_bits(), "scales by {}", path);
            prop_assert_eq!(&got.codes, &reference.codes, "codes by {}", path);
            prop_assert_eq!(got.unpacked().len(), rows * cols);
            prop_assert_eq!(got.error.squared_error.to_bits(), reference.error.squared_error.to_bits());
            prop_assert_eq!(got.error.squared_norm.to_bits(), reference.error.squared_norm.to_bits());
            prop_assert_eq!(bits(&got.dequantize(path)), bits(&values), "values by {}", path);
        }
        let (error, norm) = (block_error(&weights, &values), block_error(&weights, &vec![0.0; values.len()]));
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-12 * b;
        prop_assert!(near(reference.error.squared_error, error) && near(reference.error.squared_norm, norm));
    }

    #[test]
    fn mse_is_never_worse_than_absmax_on_any_block(
        (kind, seed, rows, cols, block) in (kind(), any::<u64>(), 1..5usize, 1..700usize, block()),
    ) {
        let weights = weights(kind, seed, rows * cols);
        let [absmax, mse] = Quantizer::ALL.map(|quantizer| {
            let path = CodecPath::fastest();
            Packed::quantize(path, "w", &weights, (rows, cols), block, quantizer).expect("finite weights")
        });
        let [a, m] = [&absmax, &mse].map(|packed| packed.dequantize(CodecPath::Scalar));
        for (row, block, range, _) in absmax.blocks() {
            let [a, m] = [&a, &m].map(|values| block_error(&weights[range.clone()], &values[range.clone()]));
            prop_assert!(m <= a, "row {}, block {}: {} > {}", row, block, m, a);
        }
    }

    #[test]
    fn dequantization_paths_agree_on_any_bytes_and_finite_scales(
        (seed, rows, cols, block) in (any::<u64>(), 1..5usize, 1..700usize, block()),
    ) {
        let layout = QpackedLayout { rows, cols, block };
        let mut r = Random(seed);
        let codes: Vec<u8> = (0..layout.code_bytes()).map(|_| r.next() as u8).collect();
        let finite = |bits: u16| if bits & 0x7c00 == 0x7c00 { bits & 0x83ff } else { bits };
        let scales: Vec<f16> = (0..layout.scales()).map(|_| f16::from_bits(finite(r.next() as u16))).collect();
        let mut reference = vec![f32::NAN; rows * cols];
        dequantize(&layout, &codes, &scales, &mut reference);
        for (i, value) in reference.iter().enumerate() {
            let (row, col) = (i / cols, i % cols);
            let byte = codes[row * layout.row_bytes() + col / 2];
            let q = f32::from(if col % 2 == 0 { byte & 0xf } else { byte >> 4 }) - 8.0;
            let d = scales[row * layout.row_blocks() + col / block.get()].to_f32();
            prop_assert_eq!(value.to_bits(), (d * q).to_bits(), "row {}, column {}", row, col);
        }
        for path in CodecPath::available() {
            let mut out = vec![f32::NAN; rows * cols];
            dequantize_with(path, &layout, &codes, &scales, &mut out);
            prop_assert_eq!(bits(&out), bits(&reference), "by {}", path);
        }
    }

    #[test]
    fn one_bad_weight_is_found_wherever_it_is(
        (seed, rows, cols, block) in (any::<u64>(), 1..5usize, 1..700usize, block()),
        (quantizer, bad) in (quantizer(), proptest::sample::select(&[
            f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 524_160.0, -524_160.0, f32::MAX,
        ][..])),
    ) {
        let mut weights = weights(Kind::Normal, seed, rows * cols);
        let at = (seed >> 32) as usize % weights.len();
        weights[at] = bad;
        let kind = if bad.is_finite() { QuantizeErrorKind::ScaleOverflow } else { QuantizeErrorKind::NonFinite };
        for path in CodecPath::available() {
            let error = Packed::quantize(path, "w", &weights, (rows, cols), block, quantizer).err();
            let error = error.expect("refused");
            prop_assert_eq!((error.kind, error.row, error.block), (kind, at / cols, at % cols / block.get()));
        }
    }
}

#[test]
fn the_default_path_is_one_of_this_cpu_and_empty_shapes_do_nothing() {
    assert!(CodecPath::available().contains(&CodecPath::fastest()));
    assert!(CodecPath::available().starts_with(&[CodecPath::Scalar, CodecPath::Portable]));
    for (rows, cols) in [(0, 0), (0, 40), (3, 0)] {
        for path in CodecPath::available() {
            let got = Packed::quantize(path, "w", &[], (rows, cols), BlockSize::B32, Quantizer::Mse);
            let got = got.expect("nothing to refuse");
            assert_eq!((got.codes.len(), got.scales.len()), (0, 0));
            assert_eq!(got.error, QuantizationError::default());
            assert_eq!(got.error.relative_rms(), 0.0);
            assert!(got.dequantize(path).is_empty());
        }
    }
}

#[test]
fn errors_of_parts_add_up_to_the_error_of_the_whole() {
    let (rows, cols) = (6, 300);
    let weights = weights(Kind::HeavyTail, 7, rows * cols);
    let error = |weights: &[f32]| {
        let rows = weights.len() / cols;
        let block = BlockSize::B128;
        Packed::quantize(
            CodecPath::fastest(),
            "w",
            weights,
            (rows, cols),
            block,
            Quantizer::Absmax,
        )
        .expect("finite weights")
        .error
    };
    let whole = error(&weights);
    let sum: QuantizationError = weights.chunks(2 * cols).map(error).sum();
    assert!(
        (sum.squared_error / whole.squared_error - 1.0).abs() < 1e-12,
        "{sum:?} and {whole:?}"
    );
    assert!(
        (sum.squared_norm / whole.squared_norm - 1.0).abs() < 1e-12,
        "{sum:?} and {whole:?}"
    );
    assert!(
        whole.relative_rms() > 0.05 && whole.relative_rms() < 0.3,
        "{whole:?}"
    );
}

#[test]
fn names_of_quantizers_round_trip_and_others_are_refused() {
    for quantizer in Quantizer::ALL {
        assert_eq!(quantizer.to_string().parse(), Ok(quantizer));
        let json = serde_json::to_string(&quantizer).expect("plain");
        assert_eq!(json, format!("\"{quantizer}\""));
    }
    let refused = "Absmax".parse::<Quantizer>().expect_err("case matters");
    assert!(refused.contains("absmax or mse"), "{refused}");
}

#[test]
#[should_panic(expected = "codes of experts.7 do not fill the layout")]
fn a_slice_of_the_wrong_length_is_the_callers_mistake() {
    let layout = QpackedLayout {
        rows: 1,
        cols: 33,
        block: BlockSize::B32,
    };
    let (mut codes, mut scales) = ([0; 16], [f16::ZERO; 2]);
    let _ = quantize(
        "experts.7",
        &[0.0; 33],
        &layout,
        Quantizer::Absmax,
        &mut codes,
        &mut scales,
    );
}
