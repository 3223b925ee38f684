//! Memory bandwidth, measured: the yardstick that decode speed is held against.

use std::io;
use std::time::Instant;

use horizon_core::memory::AnonymousMemory;
use rayon::prelude::*;
use serde::Serialize;

/// Bytes read a pass: far larger than any cache.
pub const BUFFER_BYTES: usize = 1 << 30;

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bandwidth {
    /// Which memory: the host's with the number of threads that read, or a card.
    pub memory: String,
    /// Bytes of one pass.
    pub bytes: u64,
    /// Passes made.
    pub passes: u32,
    /// Bytes a second: of the fastest pass over host memory, the median pass over a card's.
    pub bytes_per_second: f64,
}

/// Reads [`BUFFER_BYTES`] of memory `passes` times with every thread of the current pool, adding up what it
/// reads, and gives the fastest pass.
///
/// # Errors
/// When the buffer cannot be had.
///
/// # Panics
/// Never: the sum of the buffer is known.
pub fn measure(passes: u32) -> io::Result<Bandwidth> {
    measure_over(BUFFER_BYTES, passes)
}

fn measure_over(bytes: usize, passes: u32) -> io::Result<Bandwidth> {
    let mut memory = AnonymousMemory::zeroed(bytes)?;
    let words = bytemuck::cast_slice_mut::<u8, u64>(memory.bytes_mut());
    // Written once: pages that were never written all share one page of zeros.
    words.par_chunks_mut(PIECE).for_each(|piece| piece.fill(1));
    let words = bytemuck::cast_slice::<u8, u64>(memory.bytes());
    let mut best = f64::INFINITY;
    for _ in 0..passes {
        let start = Instant::now();
        let sum: u64 = words.par_chunks(PIECE).map(sum).sum();
        best = best.min(start.elapsed().as_secs_f64());
        assert_eq!(sum, words.len() as u64, "every word read is 1");
    }
    let bytes_per_second = bytes as f64 / best;
    Ok(Bandwidth {
        memory: format!("host memory, {} threads", rayon::current_num_threads()),
        bytes: bytes as u64,
        passes,
        bytes_per_second,
    })
}

/// Words that one task reads: 4 MiB.
const PIECE: usize = 1 << 19;

/// Sum in eight independent lanes, so that additions never wait for each other.
fn sum(words: &[u64]) -> u64 {
    let (lanes, rest) = words.as_chunks::<8>();
    let mut sums = [0u64; 8];
    for lane in lanes {
        for (s, w) in sums.iter_mut().zip(lane) {
            *s = s.wrapping_add(*w);
        }
    }
    sums.iter().chain(rest).fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_reads_every_word_and_is_positive() {
        let b = measure_over(64 << 20, 2).expect("64 MiB can be had");
        assert!(
            b.bytes_per_second.is_finite() && b.bytes_per_second > 1e8,
            "{b:?}"
        );
        assert_eq!(sum(&(0..1003).collect::<Vec<u64>>()), 1003 * 1002 / 2);
    }
}
