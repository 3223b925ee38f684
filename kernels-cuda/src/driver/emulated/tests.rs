//! What the emulator must compute, and what it must report.

use std::time::{Duration, Instant};

use half::f16;

use super::{EmulatedDriver, EmulatedOptions};
use crate::driver::{DevicePtr, Driver, DriverError, Launch, Stream};

/// `TestArgs` of emulator/test.cu.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct TestArgs {
    out: u64,
    input: u64,
    n: u32,
    what: u32,
}

struct Bench {
    driver: EmulatedDriver,
    stream: Stream,
}

impl Bench {
    fn new(options: EmulatedOptions) -> Self {
        let driver = EmulatedDriver::new(options);
        let stream = driver.stream().unwrap();
        Self { driver, stream }
    }

    /// One in each order of the threads.
    fn both() -> [Self; 2] {
        [false, true].map(|reversed| {
            Self::new(EmulatedOptions {
                reversed,
                ..EmulatedOptions::default()
            })
        })
    }

    fn upload(&self, words: &[u32]) -> DevicePtr {
        let to = self.driver.allocate(words.len() * 4, "test input").unwrap();
        // SAFETY: `words` lives until the stream is drained.
        unsafe {
            self.driver
                .copy_to_device(self.stream, to, words.as_ptr().cast(), words.len() * 4)
        }
        .unwrap();
        self.driver.synchronize(self.stream).unwrap();
        to
    }

    fn download(&self, from: DevicePtr, n: usize) -> Result<Vec<u32>, DriverError> {
        let mut words = vec![0u32; n];
        // SAFETY: `words` lives until the stream is drained.
        unsafe {
            self.driver
                .copy_to_host(self.stream, words.as_mut_ptr().cast(), from, n * 4)
        }?;
        self.driver.synchronize(self.stream)?;
        Ok(words)
    }

    fn launch(&self, name: &str, grid: [u32; 3], threads: u32, shared: u32, args: TestArgs) -> Launch {
        let kernel = self.driver.kernel(name).unwrap();
        let args = bytemuck::bytes_of(&args).to_vec();
        Launch {
            kernel,
            grid,
            threads,
            shared,
            args,
            overlaps: false,
            cooperative: false,
        }
    }

    /// Runs a launch whose output starts as `out`, and gives back what it has become.
    fn run(&self, launch: &Launch, out: DevicePtr, n: usize) -> Result<Vec<u32>, DriverError> {
        // SAFETY: every test hands its kernel memory of the sizes that it needs, or none at all on purpose.
        unsafe { self.driver.launch(self.stream, launch) }?;
        self.download(out, n)
    }
}

fn args(out: DevicePtr, input: DevicePtr, n: u32, what: u32) -> TestArgs {
    TestArgs {
        out: out.0,
        input: input.0,
        n,
        what,
    }
}

/// A sequence of words that looks like noise.
fn noise(n: usize) -> Vec<u32> {
    let mut state = 0x9e37_79b9u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    (0..n).map(|_| next()).collect()
}

#[test]
fn lanes_exchange() {
    for bench in Bench::both() {
        let input: Vec<u32> = noise(64).iter().map(|v| v % 1000).collect();
        let out = bench.upload(&[0; 256]);
        let launch = bench.launch("test_lanes", [1; 3], 64, 0, args(out, bench.upload(&input), 0, 0));
        let got = bench.run(&launch, out, 256).unwrap();
        for id in 0..64 {
            let warp = &input[id / 32 * 32..][..32];
            let lane = id % 32;
            assert_eq!(got[id], warp[lane ^ 1] + 3 * warp[lane ^ 16]);
            assert_eq!(got[64 + id], warp[(id / 4 * 3 + 1) % 32]);
            assert_eq!(got[128 + id], warp.iter().sum::<u32>());
            let ballot = (0..32).fold(0, |m, i| m | u32::from(warp[i].is_multiple_of(3)) << i);
            assert_eq!(got[192 + id], ballot);
        }
    }
}

#[test]
fn blocks_meet_without_those_that_returned() {
    for bench in Bench::both() {
        let input: Vec<u32> = noise(1000).iter().map(|v| v % 1000).collect();
        let out = bench.upload(&[0; 12]);
        let device = bench.upload(&input);
        for n in [1u32, 33, 64, 517, 1000] {
            let launch = bench.launch("test_block_sum", [2, 3, 2], 1024, 4 * n, args(out, device, n, 0));
            let sum: u32 = input[..n as usize].iter().sum();
            assert_eq!(bench.run(&launch, out, 12).unwrap(), [sum; 12], "n = {n}");
        }
    }
}

#[test]
fn products_equal_three_loops() {
    let halves: Vec<f16> = noise(384)
        .iter()
        .map(|v| f16::from_f32((v % 4001) as f32 / 500.0 - 4.0))
        .collect();
    let start: Vec<f32> = noise(128).iter().map(|v| (v % 1000) as f32 / 7.0).collect();
    let mut expected = start.clone();
    for _ in 0..3 {
        for (i, sum) in expected.iter_mut().enumerate() {
            for k in 0..16 {
                let (a, b) = (halves[i / 8 * 16 + k], halves[256 + k * 8 + i % 8]);
                *sum += a.to_f32() * b.to_f32();
            }
        }
    }
    for bench in Bench::both() {
        let out = bench.upload(bytemuck::cast_slice(&start));
        let words: Vec<u32> = halves
            .chunks(2)
            .map(|p| u32::from(p[0].to_bits()) | u32::from(p[1].to_bits()) << 16)
            .collect();
        let launch = bench.launch(
            "test_product",
            [1; 3],
            32,
            0,
            args(out, bench.upload(&words), 3, 0),
        );
        let got = bench.run(&launch, out, 128).unwrap();
        assert_eq!(bytemuck::cast_slice::<u32, f32>(&got), expected);
    }
}

/// The FP16 nearest to an exact value, ties to even, by search among the neighbours: `value` is given as a sum of two
/// doubles that hold it exactly.
fn nearest(high: f64, low: f64) -> u16 {
    let guess = f16::from_f64(high).to_bits();
    let distance = |bits: u16| {
        let v = f64::from(f16::from_bits(bits));
        // Both differences are exact: the values are within a factor of two, or zero.
        ((high - v) + low).abs()
    };
    let near = [guess.wrapping_sub(1), guess, guess + 1];
    let finite = |b: &u16| {
        f16::from_bits(*b).is_finite() && f16::from_bits(*b).is_sign_negative() == (guess >> 15 == 1)
    };
    let mut best = guess;
    for bits in near.into_iter().filter(finite) {
        let (new, old) = (distance(bits), distance(best));
        if new < old || (new == old && bits % 2 == 0) {
            best = bits;
        }
    }
    best
}

#[test]
fn halves_are_rounded_once() {
    let n = 20_000;
    let mut words = noise(3 * n);
    // Ties and near ties: a sum of a large and a half-unit value, with and without a trace of a third.
    for (i, special) in [
        [0x3c00, 0x1000, 0x0001],
        [0x1000, 0x3c00, 0x3c01],
        [0x8001, 0x3c00, 0x7800],
    ]
    .iter()
    .enumerate()
    {
        words[3 * i..3 * i + 3].copy_from_slice(special);
    }
    let bench = Bench::new(EmulatedOptions::default());
    let out = bench.upload(&vec![0; 3 * n]);
    let blocks = n.div_ceil(256) as u32;
    let launch = bench.launch(
        "test_halves",
        [blocks, 1, 1],
        256,
        0,
        args(out, bench.upload(&words), n as u32, 0),
    );
    let got = bench.run(&launch, out, 3 * n).unwrap();
    let mut compared = 0;
    for i in 0..n {
        for shift in [0, 16] {
            let half = |j: usize| f16::from_bits((words[3 * i + j] >> shift) as u16);
            let [a, b, c] = [half(0), half(1), half(2)].map(f64::from);
            let result = |j: usize| (got[3 * i + j] >> shift) as u16;
            // A product and a sum of FP16 fit a double; what a second sum loses is found exactly (two-sum).
            let product = a * b;
            let sum = product + c;
            let virtual_c = sum - product;
            let lost = (product - (sum - virtual_c)) + (c - virtual_c);
            for (j, high, low) in [(0, a + b, 0.0), (1, sum, lost)] {
                if high.is_finite() && high.abs() < 65504.0 && high != 0.0 {
                    assert_eq!(result(j), nearest(high, low), "{:x?}", &words[3 * i..3 * i + 3]);
                    compared += 1;
                } else if high.is_nan() {
                    assert_eq!(result(j), 0x7fff);
                } else if high.abs() >= 65520.0 {
                    assert_eq!(
                        f64::from(f16::from_bits(result(j))),
                        high.signum() * f64::INFINITY
                    );
                }
            }
        }
        let bytes: Vec<u8> = words[3 * i..3 * i + 2]
            .iter()
            .flat_map(|w| w.to_le_bytes())
            .collect();
        let picked = (0..4).fold(0, |r, j| {
            r | u32::from(bytes[(words[3 * i + 2] >> (4 * j) & 7) as usize]) << (8 * j)
        });
        assert_eq!(got[3 * i + 2], picked);
    }
    assert!(compared > 40_000, "{compared} finite results");
}

#[test]
fn a_block_may_wait_for_an_earlier_one() {
    for bench in Bench::both() {
        let out = bench.upload(&[0; 52]);
        let launch = bench.launch("test_turns", [50, 1, 1], 64, 4, args(out, out, 0, 0));
        let got = bench.run(&launch, out, 52).unwrap();
        assert_eq!(got[..2], [50, 50]);
        let mut blocks = got[2..].to_vec();
        blocks.sort_unstable();
        assert_eq!(blocks, (0..50).collect::<Vec<u32>>());
    }
}

#[test]
fn cooperative_blocks_all_run() {
    for bench in Bench::both() {
        let out = bench.upload(&[0; 6]);
        let mut launch = bench.launch("test_grid_barrier", [4, 1, 1], 96, 0, args(out, out, 10, 0));
        launch.cooperative = true;
        assert_eq!(bench.run(&launch, out, 6).unwrap(), [80, 9, 10, 11, 12, 0]);
        launch.grid = [5, 1, 1];
        let error = bench.run(&launch, out, 6).unwrap_err().to_string();
        assert!(error.contains("5 cooperative blocks, 4 fit"), "{error}");
    }
}

#[test]
fn copies_arrive_at_their_wait() {
    for bench in Bench::both() {
        let input = noise(128 * 7);
        let device = bench.upload(&input);
        let out = bench.upload(&[0; 128 * 7]);
        let launch = |n, what| bench.launch("test_copies", [1; 3], 32, 1536, args(out, device, n, what));
        assert_eq!(bench.run(&launch(128 * 7, 0), out, 128 * 7).unwrap(), input);
        // Without the wait the buffers still hold poison.
        assert_eq!(bench.run(&launch(128, 1), out, 128).unwrap(), [u32::MAX; 128]);
    }
}

#[test]
fn graphs_streams_and_the_host() {
    let bench = Bench::new(EmulatedOptions::default());
    let driver = &bench.driver;
    let pinned = driver.allocate_pinned(64).unwrap();
    let host = |at: u64| DevicePtr(pinned.device.0 + at);
    // A chain of two kernels, of which each waits for the word before it.
    let first = bench.launch("test_host", [1; 3], 32, 0, args(host(4), host(0), 7, 0));
    let second = bench.launch("test_host", [1; 3], 32, 0, args(host(8), host(4), 8, 0));
    let event = driver.event().unwrap();
    assert!(driver.passed(event).unwrap());
    // SAFETY: the words are the pinned memory's, which outlives the graph.
    unsafe {
        let graph = driver.graph(bench.stream, &[first, second]).unwrap();
        driver.launch_graph(bench.stream, graph).unwrap();
    }
    driver.record(event, bench.stream).unwrap();
    let other = driver.stream().unwrap();
    driver.stream_wait(other, event).unwrap();
    let after = driver.event().unwrap();
    driver.record(after, other).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(!driver.passed(event).unwrap() && !driver.passed(after).unwrap());
    // SAFETY: aligned words of the pinned memory; the kernel's side is volatile, too.
    let word = |at: usize| unsafe { pinned.host.add(at).cast::<u32>().read_volatile() };
    // SAFETY: as above.
    unsafe { pinned.host.cast::<u32>().write_volatile(7) };
    driver.synchronize(other).unwrap();
    assert!(driver.passed(event).unwrap() && driver.passed(after).unwrap());
    assert_eq!((word(4), word(8)), (8, 9));
    assert!(driver.elapsed_ms(event, after).unwrap() >= 0.0);
    driver.free_pinned(pinned);
}

#[test]
fn mistakes_are_reported() {
    let patience = Duration::from_millis(300);
    for (what, shared, expected) in [
        (
            0,
            0,
            "test_mistakes, block (0, 0, 0), thread 1: returns while other threads of its warp wait for it at a shuffle",
        ),
        (
            1,
            0,
            "thread 16: calls a ballot while other threads of its warp wait at a shuffle",
        ),
        (
            2,
            0,
            "test_mistakes can never end: block (0, 0, 0): threads 3 warp_sync; threads 0-2 4-31 block_sync; threads 32-63",
        ),
        (
            3,
            0,
            "does not get on: it waits for something that nobody does: block (0, 0, 0): threads 0-4 6-31 block_sync; threads 5 pause;",
        ),
        (
            4,
            0,
            "which is nobody's memory: 2260 bytes after the start of test output (260 bytes)",
        ),
        (5, 0, "something wrote beside test output (260 bytes)"),
        (6, 100, "wrote outside its 100 bytes of shared memory"),
        (7, 0, "is not a multiple of the 16 bytes accessed"),
        (8, 0, "uses more than 64 KB of stack"),
    ] {
        let bench = Bench::new(EmulatedOptions {
            patience,
            ..EmulatedOptions::default()
        });
        let input = bench.upload(&[0; 64]);
        let out = bench.driver.allocate(260, "test output").unwrap();
        let n = if what == 6 { 100 } else { 65 };
        let name = if what == 8 { "test_stack" } else { "test_mistakes" };
        let launch = bench.launch(name, [1; 3], 64, shared, args(out, input, n, what));
        let begin = Instant::now();
        let error = bench.run(&launch, out, 64).unwrap_err();
        assert!(matches!(error, DriverError::Lost { .. }), "{what}: {error:?}");
        assert!(error.to_string().contains(expected), "{what}: {error}");
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        // It stays lost.
        assert_eq!(bench.run(&launch, out, 64).unwrap_err(), error);
    }
}

#[test]
fn memory_starts_poisoned_and_is_bounded() {
    let options = EmulatedOptions {
        memory_bytes: 1 << 20,
        ..EmulatedOptions::default()
    };
    let bench = Bench::new(options);
    let out = bench.driver.allocate(256, "test output").unwrap();
    assert_eq!(bench.download(out, 64).unwrap(), [u32::MAX; 64]);
    bench.upload(&[0; 64]);
    let launch = bench.launch("test_mistakes", [1; 3], 64, 256, args(out, out, 0, 8));
    assert_eq!(bench.run(&launch, out, 64).unwrap(), [u32::MAX; 64]);
    assert_eq!(bench.driver.allocated(), (512, 2));
    let error = bench.driver.allocate(1 << 20, "test input").unwrap_err();
    assert!(
        matches!(
            error,
            DriverError::OutOfMemory {
                bytes: 1_048_576,
                free: 1_048_064,
                ..
            }
        ),
        "{error:?}"
    );
    assert!(bench.download(out.offset(4), 64).is_err());
    bench.driver.free(out);
    assert_eq!(bench.driver.memory().unwrap().0, (1 << 20) - 256);
}

#[test]
fn wrong_launches_are_refused() {
    let bench = Bench::new(EmulatedOptions::default());
    let good = bench.launch(
        "test_mistakes",
        [1; 3],
        64,
        0,
        args(DevicePtr(0), DevicePtr(0), 0, 99),
    );
    assert!(bench.driver.kernel("test_nothing").is_err());
    let mut longer = good.clone();
    longer.args.push(0);
    for (bad, expected) in [
        (longer, "25 bytes of arguments, its struct has 24"),
        (
            Launch {
                threads: 65,
                ..good.clone()
            },
            "65 threads a block, it declares at most 64",
        ),
        (
            Launch {
                grid: [1, 0, 1],
                ..good.clone()
            },
            "a grid of [1, 0, 1]",
        ),
        (
            Launch {
                shared: 49_153,
                ..good.clone()
            },
            "49153 bytes of shared memory, 49152 are allowed",
        ),
    ] {
        // SAFETY: the kernel touches no memory with what = 99.
        let error = unsafe { bench.driver.launch(bench.stream, &bad) }.unwrap_err();
        assert!(error.to_string().ends_with(expected), "{error}");
    }
    let larger = Launch {
        shared: 200_000,
        ..good
    };
    bench.driver.allow_shared(larger.kernel, 200_000).unwrap();
    // SAFETY: as above.
    unsafe { bench.driver.launch(bench.stream, &larger) }.unwrap();
    bench.driver.synchronize(bench.stream).unwrap();
}

#[test]
fn many_devices_one_after_another() {
    let mut streams = Vec::new();
    for round in 0..60u32 {
        let bench = Bench::new(EmulatedOptions::default());
        let out = bench.upload(&[0; 4]);
        let launch = bench.launch("test_block_sum", [4, 1, 1], 1024, 4096, args(out, out, 1, 0));
        assert_eq!(bench.run(&launch, out, 4).unwrap(), [0; 4], "round {round}");
        // Kept: their threads live on.
        streams.push(bench);
    }
}
