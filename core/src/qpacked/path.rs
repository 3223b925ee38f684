//! Which instructions the codec uses. Every path gives the same bits.

use std::fmt;

/// A way of quantizing and dequantizing: the reference, or the fast code compiled for an instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CodecPath {
    /// The rules as written, value by value; what the others are tested against.
    Scalar,
    /// The fast code, compiled for whatever the program was compiled for.
    Portable,
    /// The fast code for AVX2 and FMA.
    Avx2,
    /// The fast code for AVX-512 (F, BW, DQ, VL).
    Avx512,
}

impl CodecPath {
    /// All paths, slowest first.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Portable, Self::Avx2, Self::Avx512];

    /// Whether this CPU has the instructions.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar | Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// The paths of this CPU, slowest first; [`CodecPath::Scalar`] is always among them.
    #[must_use]
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|p| p.is_available()).collect()
    }

    /// The fastest path of this CPU.
    #[must_use]
    pub fn fastest() -> Self {
        Self::ALL
            .into_iter()
            .rfind(|p| p.is_available())
            .unwrap_or(Self::Portable)
    }
}

impl fmt::Display for CodecPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}
