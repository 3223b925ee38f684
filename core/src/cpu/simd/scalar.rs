//! Plain Rust lanes: any CPU, and the meaning of the others.

use half::f16;

use super::Simd;
use crate::cpu::numerics::{LANES, fold};

/// No instruction set needed.
#[derive(Clone, Copy)]
pub struct Scalar;

impl Simd for Scalar {
    type V = [f32; LANES];
    type Codes = [u32; LANES];
    type Scale = f32;
    type Sums = [i32; LANES];
    type Pairs = [[i16; 2]; LANES];

    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    fn prefetch<T>(self, _: &T, _: usize) {}

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        *x
    }

    #[inline(always)]
    fn load_f16(self, x: &[f16; LANES]) -> Self::V {
        x.map(f16::to_f32)
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::V {
        x.map(f32::from)
    }

    #[inline(always)]
    fn store(self, v: Self::V, out: &mut [f32; LANES]) {
        *out = v;
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|l| a[l] * b[l])
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|l| a[l].mul_add(b[l], c[l]))
    }

    #[inline(always)]
    fn fold(self, v: Self::V) -> f32 {
        fold(v)
    }

    #[inline(always)]
    fn codes(self, bytes: &[u8; 4 * LANES]) -> Self::Codes {
        let words = bytes.as_chunks::<4>().0;
        std::array::from_fn(|l| u32::from_le_bytes(words[l]))
    }

    #[inline(always)]
    fn scale(self, d: f16) -> f32 {
        d.to_f32()
    }

    #[inline(always)]
    fn next_weights(self, codes: &mut Self::Codes, scale: f32) -> Self::V {
        self.next_integers(codes).map(|q| scale * q)
    }

    #[inline(always)]
    fn next_integers(self, codes: &mut Self::Codes) -> Self::V {
        codes.each_mut().map(|c| {
            #[expect(clippy::cast_precision_loss, reason = "four bits")]
            let q = (*c & 15) as f32 - 8.0;
            *c >>= 4;
            q
        })
    }

    #[inline(always)]
    fn no_sums(self) -> Self::Sums {
        [0; LANES]
    }

    #[inline(always)]
    fn load_pairs(self, x: &[i16; 2 * LANES]) -> Self::Pairs {
        let pairs = x.as_chunks::<2>().0;
        std::array::from_fn(|l| pairs[l])
    }

    #[inline(always)]
    fn add_products(self, codes: &mut Self::Codes, x: Self::Pairs, mut sums: Self::Sums) -> Self::Sums {
        for ((word, [low, high]), sum) in codes.iter_mut().zip(x).zip(&mut sums) {
            let q = |shift: u32| ((*word >> shift) & 15) as i32 - 8;
            *sum += q(0) * i32::from(low) + q(16) * i32::from(high);
            *word = (*word >> 4) & 0x0FFF_0FFF;
        }
        sums
    }

    #[inline(always)]
    fn widen_sums(self, sums: Self::Sums) -> Self::V {
        #[expect(clippy::cast_precision_loss, reason = "below 2^24")]
        sums.map(|s| s as f32)
    }

    #[inline(always)]
    fn splat_f16(self, x: f16) -> Self::V {
        [x.to_f32(); LANES]
    }
}
