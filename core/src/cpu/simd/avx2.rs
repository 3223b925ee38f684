//! AVX2 with FMA and F16C: two registers of lanes.
#![expect(
    unsafe_code,
    reason = "vector intrinsics; every call rests on the proof that an `Avx2` value is"
)]

use std::arch::x86_64::{
    __m256, __m256i, _MM_HINT_T0, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_cvtss_f32, _mm_loadl_epi64,
    _mm_loadu_si128, _mm_prefetch, _mm256_add_epi32, _mm256_and_si256, _mm256_cvtepi8_epi32,
    _mm256_cvtepi32_ps, _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256,
    _mm256_madd_epi16, _mm256_mul_ps, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setzero_si256, _mm256_srli_epi16, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_sub_epi16,
    _mm256_sub_epi32,
};

use half::f16;

use super::{Kernel, Simd};
use crate::cpu::numerics::{LANES, fold};

/// Proof that the CPU has AVX2, FMA and F16C; made only by [`Avx2::detect`].
#[derive(Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// The proof, if this CPU has the instructions.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }

    /// Runs a kernel compiled for these instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn featured<K: Kernel>(kernel: K, s: Avx2) -> K::Output {
            kernel.run(s)
        }
        // SAFETY: `self` proves that the CPU has the features that `featured` enables.
        unsafe { featured(kernel, self) }
    }
}

impl Simd for Avx2 {
    /// Lanes 0..8 and 8..16.
    type V = [__m256; 2];
    type Codes = [__m256i; 2];
    type Scale = __m256;
    type Sums = [__m256i; 2];
    type Pairs = [__m256i; 2];

    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    fn prefetch<T>(self, data: &T, bytes: usize) {
        let line = std::ptr::from_ref(data).cast::<i8>().wrapping_add(bytes);
        // SAFETY: a prefetch reads nothing and never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: `self` proves AVX2.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        let [low, high] = halves(x);
        // SAFETY: `self` proves AVX2; each reference covers the 32 bytes read, which need no alignment.
        unsafe { [_mm256_loadu_ps(low.as_ptr()), _mm256_loadu_ps(high.as_ptr())] }
    }

    #[inline(always)]
    fn load_f16(self, x: &[f16; LANES]) -> Self::V {
        let [low, high] = halves(x);
        // SAFETY: `self` proves AVX2 and F16C; each reference covers the 16 bytes read, unaligned.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(low.as_ptr().cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(high.as_ptr().cast())),
            ]
        }
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::V {
        let [low, high] = halves(x);
        // SAFETY: `self` proves AVX2; each reference covers the 8 bytes read, unaligned.
        unsafe {
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(low.as_ptr().cast()))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(high.as_ptr().cast()))),
            ]
        }
    }

    #[inline(always)]
    fn store(self, v: Self::V, out: &mut [f32; LANES]) {
        let (low, high) = out.split_at_mut(8);
        // SAFETY: `self` proves AVX2; each exclusive slice covers the 32 bytes written, unaligned.
        unsafe {
            _mm256_storeu_ps(low.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(high.as_mut_ptr(), v[1]);
        }
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves AVX2.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: `self` proves FMA.
        unsafe {
            [
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1]),
            ]
        }
    }

    #[inline(always)]
    fn fold(self, v: Self::V) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        fold(lanes)
    }

    #[inline(always)]
    fn codes(self, bytes: &[u8; 4 * LANES]) -> Self::Codes {
        let [low, high] = halves(
            bytes
                .as_chunks::<4>()
                .0
                .as_array::<LANES>()
                .expect("64 bytes are 16 words"),
        );
        // SAFETY: `self` proves AVX2; each reference covers the 32 bytes read, unaligned.
        unsafe {
            [
                _mm256_loadu_si256(low.as_ptr().cast()),
                _mm256_loadu_si256(high.as_ptr().cast()),
            ]
        }
    }

    #[inline(always)]
    fn scale(self, d: f16) -> __m256 {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_set1_ps(d.to_f32()) }
    }

    #[inline(always)]
    fn next_weights(self, codes: &mut Self::Codes, scale: __m256) -> Self::V {
        let q = self.next_integers(codes);
        self.mul(q, [scale; 2])
    }

    #[inline(always)]
    fn next_integers(self, codes: &mut Self::Codes) -> Self::V {
        let mut out = self.splat(0.0);
        for (c, out) in codes.iter_mut().zip(&mut out) {
            // SAFETY: `self` proves AVX2.
            unsafe {
                let q = _mm256_sub_epi32(_mm256_and_si256(*c, _mm256_set1_epi32(15)), _mm256_set1_epi32(8));
                *c = _mm256_srli_epi32::<4>(*c);
                *out = _mm256_cvtepi32_ps(q);
            }
        }
        out
    }

    #[inline(always)]
    fn no_sums(self) -> Self::Sums {
        // SAFETY: `self` proves AVX2.
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    #[inline(always)]
    fn load_pairs(self, x: &[i16; 2 * LANES]) -> Self::Pairs {
        let halves = x.as_chunks::<LANES>().0;
        // SAFETY: `self` proves AVX2; each reference covers the 32 bytes read, unaligned.
        unsafe {
            [
                _mm256_loadu_si256(halves[0].as_ptr().cast()),
                _mm256_loadu_si256(halves[1].as_ptr().cast()),
            ]
        }
    }

    #[inline(always)]
    fn add_products(self, codes: &mut Self::Codes, x: Self::Pairs, mut sums: Self::Sums) -> Self::Sums {
        for ((c, x), sum) in codes.iter_mut().zip(x).zip(&mut sums) {
            // SAFETY: `self` proves AVX2.
            unsafe {
                let q = _mm256_sub_epi16(_mm256_and_si256(*c, _mm256_set1_epi16(15)), _mm256_set1_epi16(8));
                *c = _mm256_srli_epi16::<4>(*c);
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(q, x));
            }
        }
        sums
    }

    #[inline(always)]
    fn widen_sums(self, sums: Self::Sums) -> Self::V {
        // SAFETY: `self` proves AVX2.
        unsafe { [_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])] }
    }

    #[inline(always)]
    fn splat_f16(self, x: f16) -> Self::V {
        // SAFETY: `self` proves F16C and AVX2.
        unsafe {
            [_mm256_set1_ps(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(
                x.to_bits(),
            ))))); 2]
        }
    }
}

#[inline(always)]
fn halves<T>(x: &[T; LANES]) -> [&[T; 8]; 2] {
    let chunks = x.as_chunks::<8>().0;
    [&chunks[0], &chunks[1]]
}
