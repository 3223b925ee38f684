//! The residency cache: an all-hit group, alone and beside a publisher; the way of a miss against two plain copies;
//! the replay of a trace.

use std::cell::Cell;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use horizon_benches::{Reporter, Threads};
use horizon_cache::replay::{Contender, Workload, simulate};
use horizon_cache::trace::{Trace, TraceHeader, TraceWriter, VERSION};
use horizon_cache::{Geometry, HostRecords, Policy, ResidentV1};
use horizon_core::cpu::transport::HostTransport;
use horizon_core::ids::{ExpertId, LayerId};
use horizon_core::memory::AnonymousMemory;
use horizon_core::provider::{ExpertProvider, RoutedGroup};
use horizon_core::qpacked::BlockSize;
use horizon_core::record::{ExpertEncoding, RecordLayout};
use horizon_core::transport::{Completion, SlotId, Transport};

/// Experts a token, as in OLMoE.
const TOP_K: usize = 8;

/// Records whose bytes say whose they are.
struct Records {
    bytes: Vec<Vec<u8>>,
    experts: usize,
}

impl Records {
    fn new(geometry: &Geometry, record_bytes: usize) -> Self {
        let record = |i: usize| (0..record_bytes).map(|b| (b * 31 + i * 7) as u8).collect();
        Self {
            bytes: (0..geometry.layers.len() * geometry.experts)
                .map(record)
                .collect(),
            experts: geometry.experts,
        }
    }
}

impl HostRecords for Records {
    fn record(&self, layer: usize, expert: ExpertId) -> &[u8] {
        &self.bytes[layer * self.experts + expert.index()]
    }
}

fn geometry(layers: u32, experts: usize, capacity: usize) -> Geometry {
    Geometry {
        layers: (0..layers).map(LayerId).collect(),
        experts,
        top_k: TOP_K,
        capacity,
        spares: TOP_K,
    }
}

struct Bench {
    cache: Arc<ResidentV1>,
    slots: Arc<HostTransport>,
    records: Arc<Records>,
}

fn bench(geometry: Geometry, record_bytes: usize) -> Bench {
    let records = Arc::new(Records::new(&geometry, record_bytes));
    let slots = HostTransport::new(geometry.slots(), 2, record_bytes).expect("memory for the slots");
    let slots = Arc::new(slots);
    let cache = ResidentV1::new(geometry, Policy::Lru, records.clone(), slots.clone()).expect("sets up");
    Bench {
        cache: Arc::new(cache),
        slots,
        records,
    }
}

fn experts(first: u32) -> Vec<ExpertId> {
    (first..).map(ExpertId).take(TOP_K).collect()
}

impl Bench {
    /// Acquires a group in a hold of its own and stops the benchmark unless its slots hold its records.
    fn check(&self, layer: u32, group: &[ExpertId]) {
        let mut hold = self.cache.capture();
        let group = RoutedGroup {
            layer: LayerId(layer),
            experts: group,
        };
        let lease = self
            .cache
            .acquire(&mut hold, &group, Completion::DONE)
            .expect("acquires");
        let addresses = lease.wait().expect("there").to_vec();
        drop(lease);
        for (e, address) in group.experts.iter().zip(addresses) {
            let slot = (0u32..)
                .map(SlotId)
                .find(|s| self.slots.address(*s) == address)
                .expect("a slot of the arena");
            let want = self.records.record(layer as usize, *e);
            assert!(self.slots.read_back(slot) == want, "{e}: wrong bytes in its slot");
        }
        self.cache.release(hold, Completion::DONE);
    }
}

/// Times `routine` and prints its fastest sample in nanoseconds.
fn nanoseconds(criterion: &mut Criterion, name: &str, mut routine: impl FnMut()) -> f64 {
    let best = Cell::new(f64::INFINITY);
    let mut group = criterion.benchmark_group("cache");
    group.measurement_time(Duration::from_secs(2));
    group.bench_function(name, |bencher| {
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
    group.finish();
    best.get() * 1e9
}

/// An all-hit group of eight: acquire, read the addresses, release. 16 layers, 32 of 64 experts resident.
fn acquire(criterion: &mut Criterion) {
    let b = bench(geometry(16, 64, 32), 64);
    let hits = experts(8);
    b.check(3, &hits);
    let group = RoutedGroup {
        layer: LayerId(3),
        experts: &hits,
    };
    let mut hold = b.cache.capture();
    let alone = nanoseconds(criterion, "acquire 8 hits", || {
        let lease = b.cache.acquire(&mut hold, &group, Completion::DONE);
        let lease = lease.expect("resident");
        black_box(lease.wait().expect("there"));
    });
    b.cache.release(hold, Completion::DONE);
    // A hold for each group, so that the publisher's victims become spares.
    let whole = || {
        let mut hold = b.cache.capture();
        let lease = b.cache.acquire(&mut hold, &group, Completion::DONE);
        black_box(lease.expect("resident").wait().expect("there"));
        b.cache.release(hold, Completion::DONE);
    };
    let captured = nanoseconds(criterion, "capture, acquire 8 hits, release", whole);
    let stop = AtomicBool::new(false);
    let beside = std::thread::scope(|scope| {
        scope.spawn(|| {
            // Another layer, another eight each time: every group is a transaction.
            for first in (0..64).step_by(TOP_K).cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let group = RoutedGroup {
                    layer: LayerId(9),
                    experts: &experts(first),
                };
                let mut hold = b.cache.capture();
                drop(
                    b.cache
                        .acquire(&mut hold, &group, Completion::DONE)
                        .expect("brought"),
                );
                b.cache.release(hold, Completion::DONE);
            }
        });
        let beside = nanoseconds(
            criterion,
            "capture, acquire 8 hits, release, beside a publisher",
            whole,
        );
        stop.store(true, Ordering::Relaxed);
        beside
    });
    if alone.is_finite() {
        println!(
            "cache: 8 hits take {alone:.0} ns (at most 300 wanted); with their own hold {captured:.0} ns, beside a \
             publisher {beside:.0} ns, {:.2} times as long (at most 2 wanted)",
            beside / captured
        );
    }
}

/// Eight misses of OLMoE's record size: host store, staging, slot; against the same bytes through two plain copies.
fn pipeline(criterion: &mut Criterion) {
    let encoding = ExpertEncoding::Qpacked {
        block: BlockSize::B256,
    };
    let record = RecordLayout::of_shape(2048, 1024, encoding).bytes;
    let b = bench(geometry(1, 2 * TOP_K, TOP_K), record);
    let groups = [experts(0), experts(8)];
    b.check(0, &groups[1]);
    b.check(0, &groups[0]);
    let reporter = Reporter::new().expect("the yardstick needs 1 GiB of memory");
    let mut figures = reporter.group(criterion, "cache");
    let bytes = TOP_K * record;
    let times = [Cell::new(f64::INFINITY), Cell::new(f64::INFINITY)];
    let timed = |i: usize, routine: &mut dyn FnMut()| {
        let start = Instant::now();
        routine();
        times[i].set(times[i].get().min(start.elapsed().as_secs_f64()));
    };
    let mut next = 0;
    figures.time("8 misses through staging", bytes, Threads::One, || {
        next = 1 - next;
        let group = RoutedGroup {
            layer: LayerId(0),
            experts: &groups[next],
        };
        timed(0, &mut || {
            let mut hold = b.cache.capture();
            let lease = b.cache.acquire(&mut hold, &group, Completion::DONE);
            black_box(lease.expect("acquires").wait().expect("there"));
            b.cache.release(hold, Completion::DONE);
        });
    });
    // Memory of the same kind as the transport's.
    let memory = |cells: usize| AnonymousMemory::zeroed(cells * record).expect("memory for the copies");
    let (mut staging, mut slots) = (memory(2), memory(2 * TOP_K));
    figures.time("8 records by two plain copies", bytes, Threads::One, || {
        next = 1 - next;
        timed(1, &mut || {
            for (i, e) in groups[next].iter().enumerate() {
                let buffer = &mut staging.bytes_mut()[i % 2 * record..][..record];
                buffer.copy_from_slice(b.records.record(0, *e));
                slots.bytes_mut()[e.index() * record..][..record].copy_from_slice(buffer);
            }
            black_box(slots.bytes());
        });
    });
    let [through, plain] = times.map(|t| t.get());
    println!(
        "cache: the way of a miss runs at {:.0} % of two plain copies of the same bytes (at least 80 wanted)",
        100.0 * plain / through
    );
}

/// A trace of OLMoE's shape: each token keeps half of the last one's experts and draws the others by lot.
fn trace(tokens: usize) -> Trace {
    let header = TraceHeader {
        version: VERSION,
        model: "made up".into(),
        experts: 64,
        top_k: TOP_K,
        record_bytes: 1,
        layers: (0..16).map(LayerId).collect(),
    };
    let mut state = 1u64;
    let mut draw = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        u16::try_from(state >> 58).expect("six bits")
    };
    let mut row: Vec<Vec<u16>> = vec![(0..8).collect(); 16];
    let mut writer = TraceWriter::new(header).expect("sound");
    for _ in 0..tokens {
        for layer in &mut row {
            layer.drain(..TOP_K / 2);
            while layer.len() < TOP_K {
                let e = draw();
                if !layer.contains(&e) {
                    layer.push(e);
                }
            }
        }
        writer.push_step(std::slice::from_ref(&row)).expect("sound");
    }
    writer.finish()
}

fn replay(criterion: &mut Criterion) {
    let workload = Workload::new(&trace(2000));
    let mut group = criterion.benchmark_group("cache/replay");
    group.sample_size(10).measurement_time(Duration::from_secs(1));
    group.throughput(Throughput::Elements(workload.requests() as u64));
    for contender in Contender::all() {
        for capacity in [16, 48] {
            let best = Cell::new(f64::INFINITY);
            group.bench_function(format!("{contender} {capacity} of 64"), |bencher| {
                bencher.iter_custom(|iterations| {
                    let start = Instant::now();
                    for _ in 0..iterations {
                        black_box(simulate(&workload, contender, capacity, TOP_K).expect("replays"));
                    }
                    let elapsed = start.elapsed();
                    best.set(best.get().min(elapsed.as_secs_f64() / iterations as f64));
                    elapsed
                });
            });
            if best.get().is_finite() {
                println!(
                    "cache: replay of {contender} at {capacity} of 64: {:.1} million requests a second (at least 5 wanted)",
                    workload.requests() as f64 / best.get() / 1e6
                );
            }
        }
    }
}

criterion_group!(benches, acquire, pipeline, replay);
criterion_main!(benches);
