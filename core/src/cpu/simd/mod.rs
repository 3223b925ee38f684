//! Sixteen FP32 lanes on whatever the CPU has, and the kernels written once over them.
//!
//! A kernel is generic over [`Simd`] and gives the same bits on every implementation, because each operation is
//! exactly rounded and the order of operations is part of the kernel.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod kernels;
mod scalar;

use std::fmt;

use half::f16;

use crate::cpu::numerics::LANES;

/// Operations on [`LANES`] FP32 lanes. A value of an implementing type is proof that the CPU has what it needs.
pub trait Simd: Copy + Send + Sync {
    /// FP32 lanes.
    type V: Copy;
    /// One 32-bit word of eight codes a lane.
    type Codes: Copy;
    /// Decoding constants of one block: its scale and whatever an implementation derives from it.
    type Scale: Copy;

    /// 32-bit integers, one a lane.
    type Sums: Copy;
    /// Two 16-bit integers a lane.
    type Pairs: Copy;

    /// Whether there are registers for four rows by four inputs; else two by two.
    const MANY_REGISTERS: bool;

    /// Asks for the cache line at `data + bytes`, which may lie outside `data`. Only speed depends on it.
    fn prefetch<T>(self, data: &T, bytes: usize);
    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Lanes from memory.
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// Lanes from FP16.
    fn load_f16(self, x: &[f16; LANES]) -> Self::V;
    /// Lanes from integers.
    fn load_i8(self, x: &[i8; LANES]) -> Self::V;
    /// Lanes to memory.
    fn store(self, v: Self::V, out: &mut [f32; LANES]);
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Sum of the lanes in the order of [`numerics::fold`](crate::cpu::numerics::fold).
    fn fold(self, v: Self::V) -> f32;
    /// 128 codes.
    fn codes(self, bytes: &[u8; 4 * LANES]) -> Self::Codes;
    /// One scale for all lanes.
    fn scale(self, d: f16) -> Self::Scale;
    /// The weights `d * q` of the low nibble of each word; moves to the next nibble.
    fn next_weights(self, codes: &mut Self::Codes, scale: Self::Scale) -> Self::V;
    /// The integers `q` of the low nibble of each word; moves to the next nibble.
    fn next_integers(self, codes: &mut Self::Codes) -> Self::V;
    /// Zero in every lane.
    fn no_sums(self) -> Self::Sums;
    /// Pairs from memory.
    fn load_pairs(self, x: &[i16; 2 * LANES]) -> Self::Pairs;
    /// Adds to each lane the products of the integers `q` of the low nibbles of its two 16-bit halves with the pair;
    /// moves both halves to their next nibble. The sums are exact.
    fn add_products(self, codes: &mut Self::Codes, x: Self::Pairs, sums: Self::Sums) -> Self::Sums;
    /// The sums as FP32.
    fn widen_sums(self, sums: Self::Sums) -> Self::V;
    /// All lanes the FP16 value `x`.
    fn splat_f16(self, x: f16) -> Self::V;
}

/// A computation over [`Simd`]. `run` must be `#[inline(always)]`, so that it is compiled for the instruction
/// set that [`Isa::run`] chooses.
pub trait Kernel {
    /// Result.
    type Output;
    /// Runs on `s`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// An instruction set of this CPU.
#[derive(Clone, Copy)]
pub struct Isa(Inner);

#[derive(Clone, Copy)]
enum Inner {
    Scalar(scalar::Scalar),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
}

impl Isa {
    /// Every instruction set that this CPU has, slowest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let all = vec![Self(Inner::Scalar(scalar::Scalar))];
        #[cfg(target_arch = "x86_64")]
        let all = all
            .into_iter()
            .chain(avx2::Avx2::detect().map(|s| Self(Inner::Avx2(s))))
            .chain(avx512::Avx512::detect().map(|s| Self(Inner::Avx512(s))))
            .collect();
        all
    }

    /// The fastest that this CPU has.
    #[must_use]
    pub fn best() -> Self {
        Self::available()
            .pop()
            .unwrap_or(Self(Inner::Scalar(scalar::Scalar)))
    }

    /// Name, as reports print it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Inner::Scalar(_) => "scalar",
            #[cfg(target_arch = "x86_64")]
            Inner::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Inner::Avx512(_) => "avx512",
        }
    }

    /// Runs a kernel compiled for this instruction set.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Inner::Scalar(s) => kernel.run(s),
            #[cfg(target_arch = "x86_64")]
            Inner::Avx2(s) => s.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Inner::Avx512(s) => s.run(kernel),
        }
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
