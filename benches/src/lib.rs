//! What every benchmark needs: the yardstick, and a reporter that holds a figure against it.
//!
//! A benchmark checks the result of what it is about to time, once, and stops if it is wrong. Then it hands the
//! routine to [`Group::time`], which lets Criterion time it and prints bytes per second of the fastest sample
//! and the share of the machine's read bandwidth, measured in the same process. `README.md` says how to read that.

use std::cell::Cell;
use std::io;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput};
use horizon_runtime::bandwidth;

/// Threads that a routine uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread.
    One,
    /// Every thread of rayon's global pool.
    All,
}

/// Read bandwidth of this machine: a sum over 1 GiB, the best of five passes, bytes a second.
#[derive(Clone, Copy, Debug)]
pub struct Yardstick {
    /// One thread.
    pub one: f64,
    /// All threads of rayon's global pool.
    pub all: f64,
    /// How many those are.
    pub threads: usize,
}

impl Yardstick {
    /// Measures it: a second or two, 1 GiB of memory.
    ///
    /// # Errors
    /// When the memory or a thread cannot be had.
    pub fn measure() -> io::Result<Self> {
        let single = rayon::ThreadPoolBuilder::new()
            .num_threads(1)
            .build()
            .map_err(io::Error::other)?;
        let one = single.install(|| bandwidth::measure(5))?.bytes_per_second;
        let all = bandwidth::measure(5)?;
        Ok(Self {
            one,
            all: all.bytes_per_second,
            threads: rayon::current_num_threads(),
        })
    }

    /// Bytes a second that `threads` can read.
    #[must_use]
    pub fn of(&self, threads: Threads) -> f64 {
        match threads {
            Threads::One => self.one,
            Threads::All => self.all,
        }
    }
}

/// Times routines and holds them against the [`Yardstick`].
#[derive(Debug)]
pub struct Reporter {
    /// Absent when the benchmarks are only tried out (`cargo test`, `--list`): then nothing is measured.
    yardstick: Option<Yardstick>,
}

impl Reporter {
    /// Measures the yardstick and prints it, if this process has been started by `cargo bench`.
    ///
    /// # Errors
    /// When the yardstick cannot be measured.
    pub fn new() -> io::Result<Self> {
        if !std::env::args().any(|argument| argument == "--bench") {
            return Ok(Self { yardstick: None });
        }
        let yardstick = Yardstick::measure()?;
        println!(
            "read bandwidth: {} with one thread, {} with {}",
            rate(yardstick.one),
            rate(yardstick.all),
            yardstick.threads
        );
        Ok(Self {
            yardstick: Some(yardstick),
        })
    }

    /// A group of figures with short samples: the routines here take milliseconds, and the best one counts.
    pub fn group<'c>(&self, criterion: &'c mut Criterion, name: &str) -> Group<'c> {
        let mut group = criterion.benchmark_group(name);
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        Group {
            yardstick: self.yardstick,
            name: name.to_owned(),
            group,
        }
    }
}

/// Figures with a common beginning of their names.
pub struct Group<'c> {
    yardstick: Option<Yardstick>,
    name: String,
    group: BenchmarkGroup<'c, WallTime>,
}

impl Group<'_> {
    /// Times `routine`, which reads or moves `bytes` bytes of memory when called once.
    pub fn time(&mut self, name: &str, bytes: usize, threads: Threads, mut routine: impl FnMut()) {
        let best = Cell::new(f64::INFINITY);
        self.group.throughput(Throughput::Bytes(bytes as u64));
        self.group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let start = Instant::now();
                for _ in 0..iterations {
                    routine();
                }
                let elapsed = start.elapsed();
                best.set(best.get().min(elapsed.as_secs_f64() / iterations as f64));
                elapsed
            });
        });
        // A name that the command line filters out was never called.
        if let Some(yardstick) = self.yardstick.filter(|_| best.get().is_finite()) {
            println!(
                "{}",
                line(
                    &format!("{}/{name}", self.name),
                    bytes,
                    best.get(),
                    yardstick.of(threads)
                )
            );
        }
    }
}

/// The line of one figure.
#[must_use]
pub fn line(name: &str, bytes: usize, seconds: f64, yardstick: f64) -> String {
    let achieved = bytes as f64 / seconds;
    let share = 100.0 * achieved / yardstick;
    format!("{name}: {}, {share:.0} % of {}", rate(achieved), rate(yardstick))
}

fn rate(bytes_per_second: f64) -> String {
    format!("{:.2} GB/s", bytes_per_second / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_names_its_rate_and_its_share_of_the_yardstick() {
        assert_eq!(
            line("x", 3_000_000, 0.001, 12e9),
            "x: 3.00 GB/s, 25 % of 12.00 GB/s"
        );
    }
}
