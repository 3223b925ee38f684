//! AVX-512: one register of lanes; a code is looked up in a register of its block's sixteen weights.
#![expect(
    unsafe_code,
    reason = "vector intrinsics; every call rests on the proof that an `Avx512` value is"
)]

use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T0, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_cvtss_f32, _mm_loadu_si128,
    _mm_prefetch, _mm256_loadu_si256, _mm256_setr_epi16, _mm512_broadcast_i64x4, _mm512_cvtepi8_epi32,
    _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_dpwssd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_mul_ps, _mm512_permutexvar_epi16, _mm512_permutexvar_ps, _mm512_set1_ps,
    _mm512_setr_ps, _mm512_setzero_si512, _mm512_srli_epi16, _mm512_srli_epi32, _mm512_storeu_ps,
};

use half::f16;

use super::{Kernel, Simd};
use crate::cpu::numerics::{LANES, fold};

/// Proof that the CPU has AVX-512 F, BW and VNNI, AVX2, FMA and F16C; made only by [`Avx512::detect`].
#[derive(Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// The proof, if this CPU has the instructions.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }

    /// Runs a kernel compiled for these instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
        fn featured<K: Kernel>(kernel: K, s: Avx512) -> K::Output {
            kernel.run(s)
        }
        // SAFETY: `self` proves that the CPU has the features that `featured` enables.
        unsafe { featured(kernel, self) }
    }
}

impl Simd for Avx512 {
    type V = __m512;
    type Codes = __m512i;
    /// The sixteen weights `d * (code - 8)`, by code.
    type Scale = __m512;
    type Sums = __m512i;
    type Pairs = __m512i;

    const MANY_REGISTERS: bool = true;

    #[inline(always)]
    fn prefetch<T>(self, data: &T, bytes: usize) {
        let line = std::ptr::from_ref(data).cast::<i8>().wrapping_add(bytes);
        // SAFETY: a prefetch reads nothing and never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` proves AVX-512 F.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> __m512 {
        // SAFETY: `self` proves AVX-512 F; the reference covers the 64 bytes read, which need no alignment.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn load_f16(self, x: &[f16; LANES]) -> __m512 {
        // SAFETY: `self` proves AVX-512 F and AVX2; the reference covers the 32 bytes read, unaligned.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> __m512 {
        // SAFETY: `self` proves AVX-512 F; the reference covers the 16 bytes read, unaligned.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn store(self, v: __m512, out: &mut [f32; LANES]) {
        // SAFETY: `self` proves AVX-512 F; the exclusive reference covers the 64 bytes written, unaligned.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512 F.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512 F.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fold(self, v: __m512) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        fold(lanes)
    }

    #[inline(always)]
    fn codes(self, bytes: &[u8; 4 * LANES]) -> __m512i {
        // SAFETY: `self` proves AVX-512 F; the reference covers the 64 bytes read, unaligned.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn scale(self, d: f16) -> __m512 {
        // SAFETY: `self` proves F16C and AVX-512 F.
        unsafe {
            let d = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(d.to_bits()))));
            _mm512_mul_ps(_mm512_set1_ps(d), integers())
        }
    }

    #[inline(always)]
    fn next_weights(self, codes: &mut __m512i, scale: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512 F. The permutation reads only the low four bits of each index.
        unsafe {
            let w = _mm512_permutexvar_ps(*codes, scale);
            *codes = _mm512_srli_epi32::<4>(*codes);
            w
        }
    }

    #[inline(always)]
    fn next_integers(self, codes: &mut __m512i) -> __m512 {
        // SAFETY: `self` proves AVX-512 F, which `integers` asks of its caller.
        let table = unsafe { integers() };
        self.next_weights(codes, table)
    }

    #[inline(always)]
    fn no_sums(self) -> __m512i {
        // SAFETY: `self` proves AVX-512 F.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    fn load_pairs(self, x: &[i16; 2 * LANES]) -> __m512i {
        // SAFETY: `self` proves AVX-512 F; the reference covers the 64 bytes read, unaligned.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn add_products(self, codes: &mut __m512i, x: __m512i, sums: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512 F, BW and VNNI. The permutation reads five bits of each index; the table
        // holds the sixteen integers twice, so that the fifth does not matter.
        unsafe {
            let low = _mm256_setr_epi16(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
            let q = _mm512_permutexvar_epi16(*codes, _mm512_broadcast_i64x4(low));
            *codes = _mm512_srli_epi16::<4>(*codes);
            _mm512_dpwssd_epi32(sums, q, x)
        }
    }

    #[inline(always)]
    fn widen_sums(self, sums: __m512i) -> __m512 {
        // SAFETY: `self` proves AVX-512 F.
        unsafe { _mm512_cvtepi32_ps(sums) }
    }

    #[inline(always)]
    fn splat_f16(self, x: f16) -> __m512 {
        // SAFETY: `self` proves F16C and AVX-512 F.
        unsafe {
            _mm512_set1_ps(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(
                x.to_bits(),
            )))))
        }
    }
}

/// The integers −8..=7, by code.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn integers() -> __m512 {
    // SAFETY: promised by the caller.
    unsafe {
        _mm512_setr_ps(
            -8., -7., -6., -5., -4., -3., -2., -1., 0., 1., 2., 3., 4., 5., 6., 7.,
        )
    }
}
