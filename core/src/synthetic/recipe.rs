//! Recipes: a checkpoint whose weights are a function of seed, tensor name and element index.
//!
//! Element `i` (row-major, from 0) of tensor `NAME`, in wrapping 64-bit arithmetic:
//!
//! ```text
//! base = fnv1a64(NAME) ^ (seed · 0x9E3779B97F4A7C15)
//! x    = mix(base + (i + 1) · 0x9E3779B97F4A7C15)          one step of splitmix64
//! s    = sum of the four 16-bit fields of x − 131070       an integer, near normal
//! v    = f32(s) · scale                                    an FP32 product
//! v    = v · 4   if outlier_every > 0 and mix(x) mod outlier_every = 0
//! out  = bf16(v + offset)                                  FP32 sum; nearest, ties to even
//! ```
//!
//! Any language writes the same bytes from the same recipe, and any part of a tensor can be made alone.

use super::SyntheticError;

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// Standard deviation of the integer `s` of the rule: four uniform 16-bit fields.
pub(super) const NOISE_STD: f64 = 37837.0;

/// A checkpoint as a rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// Mixed into every tensor.
    pub seed: u64,
    /// The tensors, in the order of the recipe.
    pub tensors: Vec<TensorRule>,
}

/// One BF16 tensor of a [`Recipe`].
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRule {
    /// File of the checkpoint that holds the tensor.
    pub file: String,
    /// Name of the tensor.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Multiplies the integer noise, whose standard deviation is 37837.
    pub scale: f32,
    /// Added to every value.
    pub offset: f32,
    /// One value in so many is four times larger; 0: none.
    pub outlier_every: u64,
}

impl Recipe {
    /// Reads the table form: `#seed<TAB>N`, then a line a tensor with file, name, shape (`2x3`), the bits of
    /// scale and offset in hexadecimal, and `outlier_every`, separated by tabs. Other lines that start with
    /// `#` are comments.
    ///
    /// # Errors
    /// [`SyntheticError::Recipe`] with the line number.
    pub fn parse(text: &str) -> Result<Self, SyntheticError> {
        let mut seed = None;
        let mut tensors = Vec::new();
        for (i, line) in text.lines().enumerate() {
            let bad = |problem: String| SyntheticError::Recipe { line: i + 1, problem };
            if let Some(value) = line.strip_prefix("#seed\t") {
                seed = Some(value.trim().parse().map_err(|e| bad(format!("seed: {e}")))?);
            } else if !line.trim().is_empty() && !line.starts_with('#') {
                tensors.push(TensorRule::parse(line).map_err(bad)?);
            }
        }
        let seed = seed.ok_or(SyntheticError::Recipe {
            line: 0,
            problem: "there is no #seed line".into(),
        })?;
        Ok(Self { seed, tensors })
    }
}

impl TensorRule {
    fn parse(line: &str) -> Result<Self, String> {
        let columns: Vec<&str> = line.trim_end().split('\t').collect();
        let [file, name, shape, scale, offset, every] = columns[..] else {
            return Err(format!("{} columns, not 6", columns.len()));
        };
        let bits = |s| {
            u32::from_str_radix(s, 16)
                .map(f32::from_bits)
                .map_err(|e| format!("{s}: {e}"))
        };
        Ok(Self {
            file: file.to_owned(),
            name: name.to_owned(),
            shape: shape
                .split('x')
                .map(|d| d.parse().map_err(|e| format!("shape {shape}: {e}")))
                .collect::<Result<_, _>>()?,
            scale: bits(scale)?,
            offset: bits(offset)?,
            outlier_every: every.parse().map_err(|e| format!("outlier_every {every}: {e}"))?,
        })
    }

    /// Values in the tensor.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of the tensor.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.elements() * 2
    }

    /// Writes the values from element `start` on to `out`, as little-endian BF16.
    ///
    /// # Panics
    /// When `out` has an odd length.
    pub fn fill(&self, seed: u64, start: usize, out: &mut [u8]) {
        let (values, rest) = out.as_chunks_mut::<2>();
        assert!(rest.is_empty(), "a BF16 value is two bytes");
        let base = fnv1a64(&self.name) ^ seed.wrapping_mul(GAMMA);
        let first = base.wrapping_add((start as u64).wrapping_mul(GAMMA));
        let (scale, offset, every) = (self.scale, self.offset, self.outlier_every);
        // Two loops, because a division in the first one would keep it from being vectorised.
        if every == 0 {
            each_draw(first, values, |x| noise(x) as f32 * scale + offset);
        } else {
            each_draw(first, values, |x| {
                let v = noise(x) as f32 * scale;
                let gain = if mix(x).is_multiple_of(every) { 4.0 } else { 1.0 };
                v * gain + offset
            });
        }
    }
}

/// Fills `values` with `value` of successive draws, narrowed to BF16.
fn each_draw(first: u64, values: &mut [[u8; 2]], value: impl Fn(u64) -> f32) {
    let mut z = first;
    for out in values {
        z = z.wrapping_add(GAMMA);
        *out = to_bf16(value(mix(z))).to_le_bytes();
    }
}

/// The BF16 pattern nearest to a finite value, ties to even; in this form the compiler vectorises it.
fn to_bf16(v: f32) -> u16 {
    let bits = v.to_bits();
    (bits.wrapping_add(0x7FFF).wrapping_add((bits >> 16) & 1) >> 16) as u16
}

fn noise(x: u64) -> i32 {
    // Two 16-bit fields added in each half of `pairs`, then the halves: at most 4 · 65535, so nothing carries over.
    let pairs = (x & 0x0000_FFFF_0000_FFFF).wrapping_add((x >> 16) & 0x0000_FFFF_0000_FFFF);
    (pairs as u32)
        .wrapping_add((pairs >> 32) as u32)
        .wrapping_sub(131_070) as i32
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn fnv1a64(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_tensor_equals_the_same_part_of_the_whole() {
        let rule = TensorRule {
            file: "f".into(),
            name: "a.weight".into(),
            shape: vec![7, 33],
            scale: 1e-5,
            offset: 0.25,
            outlier_every: 16,
        };
        let mut whole = vec![0; rule.bytes()];
        rule.fill(5, 0, &mut whole);
        for (start, len) in [(0, 1), (1, 40), (100, 131), (230, 1)] {
            let mut part = vec![0; len * 2];
            rule.fill(5, start, &mut part);
            assert_eq!(part, whole[start * 2..(start + len) * 2], "from {start}");
        }
        let mut other = vec![0; rule.bytes()];
        rule.fill(6, 0, &mut other);
        assert_ne!(whole, other);
    }

    #[test]
    fn the_noise_is_centred_with_the_stated_spread() {
        let n = 1 << 16;
        let draws = (0..n).map(|i| f64::from(noise(mix(GAMMA.wrapping_mul(i + 1)))));
        let (sum, squares) = draws.fold((0.0, 0.0), |(s, q), v| (s + v, q + v * v));
        let (mean, std) = (sum / n as f64, (squares / n as f64).sqrt());
        assert!(mean.abs() < 600.0, "mean {mean}");
        assert!((std / NOISE_STD - 1.0).abs() < 0.01, "standard deviation {std}");
    }

    #[test]
    fn a_bad_line_is_named() {
        let good = "#seed\t1\nf\tn\t2x3\t3f800000\t00000000\t0\n";
        assert_eq!(Recipe::parse(good).expect("well formed").tensors[0].shape, [2, 3]);
        for (text, line) in [
            ("f\tn\t2\t3f800000\t0\t0\n", 0),
            ("#seed\tx\n", 1),
            ("#seed\t1\nf\tn\t2x\t3f800000\t0\t0\n", 2),
            ("#seed\t1\n#c\nf\tn\t2\tzz\t0\t0\n", 3),
            ("#seed\t1\nf\tn\t2\t0\t0\n", 2),
        ] {
            match Recipe::parse(text) {
                Err(SyntheticError::Recipe { line: at, .. }) => assert_eq!(at, line, "{text:?}"),
                other => panic!("{text:?}: {other:?}"),
            }
        }
    }
}
