//! A device without a card: the kernel sources compiled for the host, each CUDA thread a fiber. For tests.
//!
//! It is strict where a card is lenient. Device memory lies between guard pages, shared memory starts as NaN, an
//! asynchronous copy arrives only at its wait, a meeting of a warp that not all 32 lanes reach fails the launch with the
//! kernel's name and the threads' numbers, and so does a launch that does not get on.

#![expect(unsafe_code, reason = "the trait's methods take raw addresses")]

mod ffi;
mod memory;
mod streams;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{DeviceInfo, DevicePtr, Driver, DriverError, Event, Graph, Kernel, Launch, Pinned, Stream};
use ffi::{Guarded, KernelEntry, Manner};
use memory::Allocations;
use streams::{EventMark, StreamThread, lock};

/// Dynamic shared memory that every kernel may use without asking.
const SHARED_DEFAULT: u32 = 48 << 10;

/// What the device is like.
#[derive(Clone, Debug)]
pub struct EmulatedOptions {
    /// Device memory, in bytes.
    pub memory_bytes: usize,
    /// Streaming multiprocessors: bounds cooperative launches.
    pub multiprocessors: u32,
    /// Compute capability, as 90 for 9.0.
    pub capability: u32,
    /// Blocks of an ordinary launch that run at once; later ones start, in order, as earlier ones end.
    pub live_blocks: u32,
    /// Threads take turns from the last to the first: shows reliance on the usual order.
    pub reversed: bool,
    /// Without progress for so long, a launch counts as hung.
    pub patience: Duration,
}

impl Default for EmulatedOptions {
    fn default() -> Self {
        Self {
            memory_bytes: 8 << 30,
            multiprocessors: 4,
            capability: 90,
            live_blocks: 4,
            reversed: false,
            patience: Duration::from_secs(60),
        }
    }
}

/// What the streams' threads share with the driver.
struct Shared {
    memory: Mutex<Allocations>,
    /// Why nothing works any more.
    lost: Mutex<Option<(&'static str, String)>>,
}

impl Shared {
    fn check(&self) -> Result<(), DriverError> {
        match &*lock(&self.lost) {
            None => Ok(()),
            Some((call, reason)) => Err(DriverError::Lost {
                call,
                reason: reason.clone(),
            }),
        }
    }

    fn lose(&self, call: &'static str, reason: String) {
        lock(&self.lost).get_or_insert((call, reason));
    }
}

struct LoadedKernel {
    entry: KernelEntry,
    shared_allowed: AtomicU32,
}

/// The device.
pub struct EmulatedDriver {
    info: DeviceInfo,
    options: EmulatedOptions,
    kernels: Vec<LoadedKernel>,
    shared: Arc<Shared>,
    pinned: Mutex<Vec<Guarded>>,
    graphs: Mutex<Vec<Arc<[Launch]>>>,
    events: Mutex<Vec<Arc<EventMark>>>,
    streams: Mutex<Vec<Arc<StreamThread>>>,
}

impl EmulatedDriver {
    /// A device like that.
    #[must_use]
    pub fn new(options: EmulatedOptions) -> Self {
        let load = |entry| LoadedKernel {
            entry,
            shared_allowed: AtomicU32::new(SHARED_DEFAULT),
        };
        Self {
            info: DeviceInfo {
                name: "emulated".to_owned(),
                capability: options.capability,
                multiprocessors: options.multiprocessors,
                shared_per_block: 227 << 10,
                shared_per_multiprocessor: 228 << 10,
                l2_bytes: 50 << 20,
                memory_bytes: options.memory_bytes,
                driver: 12080,
            },
            options,
            kernels: ffi::kernels().into_iter().map(load).collect(),
            shared: Arc::new(Shared {
                memory: Mutex::default(),
                lost: Mutex::default(),
            }),
            pinned: Mutex::default(),
            graphs: Mutex::default(),
            events: Mutex::default(),
            streams: Mutex::default(),
        }
    }

    fn loaded(&self, kernel: Kernel) -> &LoadedKernel {
        &self.kernels[kernel.0]
    }

    fn line(&self, stream: Stream) -> Arc<StreamThread> {
        Arc::clone(&lock(&self.streams)[stream.0])
    }

    fn mark(&self, event: Event) -> Arc<EventMark> {
        Arc::clone(&lock(&self.events)[event.0])
    }

    /// Whether device or page-locked memory holds the whole range.
    fn check_range(&self, address: DevicePtr, bytes: usize) -> Result<(), String> {
        let pinned = lock(&self.pinned).iter().any(|p| {
            let start = p.address() as u64;
            address.0 >= start && address.0 + bytes as u64 <= start + p.len() as u64
        });
        if pinned {
            return Ok(());
        }
        lock(&self.shared.memory).check_range(address.0, bytes)
    }

    /// What a card's driver would refuse.
    fn check_launch(&self, launch: &Launch) -> Result<(), DriverError> {
        let kernel = self.loaded(launch.kernel);
        let entry = kernel.entry;
        let refuse = |reason: String| {
            let reason = format!("{}: {reason}", entry.name());
            Err(DriverError::Call {
                call: "launch",
                reason,
            })
        };
        if launch.args.len() != entry.args() {
            return refuse(format!(
                "{} bytes of arguments, its struct has {}",
                launch.args.len(),
                entry.args()
            ));
        }
        if launch.threads == 0 || launch.threads > entry.threads() {
            return refuse(format!(
                "{} threads a block, it declares at most {}",
                launch.threads,
                entry.threads()
            ));
        }
        let blocks: u64 = launch.grid.iter().map(|&n| u64::from(n)).product();
        if blocks == 0 || launch.grid[1] > 65535 || launch.grid[2] > 65535 {
            return refuse(format!("a grid of {:?}", launch.grid));
        }
        let allowed = kernel.shared_allowed.load(Ordering::Relaxed);
        if launch.shared > allowed {
            return refuse(format!(
                "{} bytes of shared memory, {allowed} are allowed",
                launch.shared
            ));
        }
        let fit = self.resident_blocks(launch.kernel, launch.threads, launch.shared)?
            * self.options.multiprocessors;
        if launch.cooperative && blocks > u64::from(fit) {
            return refuse(format!("{blocks} cooperative blocks, {fit} fit at once"));
        }
        Ok(())
    }

    /// A launch as a job of a stream.
    fn job(&self, launch: Launch) -> impl FnOnce() + Send + 'static {
        let entry = self.loaded(launch.kernel).entry;
        let blocks = launch.grid.iter().fold(1u32, |a, &n| a.saturating_mul(n));
        let manner = Manner {
            live_blocks: if launch.cooperative {
                blocks
            } else {
                self.options.live_blocks.max(1)
            },
            reversed: self.options.reversed,
            patience_ms: u32::try_from(self.options.patience.as_millis()).unwrap_or(u32::MAX),
        };
        let shared = Arc::clone(&self.shared);
        move || {
            if shared.check().is_err() {
                return;
            }
            // SAFETY: the struct's size was checked; its contents are the promise of `launch` and `graph`.
            if let Err(failure) = unsafe { ffi::run(entry, &launch, manner) } {
                let place = failure.fault.map(|address| lock(&shared.memory).place(address));
                let reason = place.map_or(failure.reason.clone(), |p| format!("{}: {p}", failure.reason));
                shared.lose("launch", reason);
            }
        }
    }

    /// A copy or fill as a job of a stream.
    fn push(&self, stream: Stream, job: impl FnOnce() + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        self.line(stream).push(move || {
            if shared.check().is_ok() {
                job();
            }
        });
    }

    fn drain(&self) {
        let streams = lock(&self.streams).clone();
        streams.iter().for_each(|s| s.drain());
    }

    /// Tells of a broken rule that no return value can carry.
    fn report(&self, reason: String) {
        self.shared.lose("free", reason.clone());
        assert!(std::thread::panicking(), "emulated device: {reason}");
    }
}

fn call_error(call: &'static str) -> impl Fn(String) -> DriverError {
    move |reason| DriverError::Call { call, reason }
}

impl Driver for EmulatedDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<(usize, usize), DriverError> {
        self.shared.check()?;
        let total = self.options.memory_bytes;
        Ok((total - lock(&self.shared.memory).used, total))
    }

    fn allocated(&self) -> (u64, u64) {
        lock(&self.shared.memory).total
    }

    fn kernel(&self, name: &str) -> Result<Kernel, DriverError> {
        let found = self.kernels.iter().position(|k| k.entry.name() == name);
        found
            .map(Kernel)
            .ok_or_else(|| DriverError::Image(format!("no kernel {name}")))
    }

    fn allow_shared(&self, kernel: Kernel, shared: u32) -> Result<(), DriverError> {
        self.shared.check()?;
        let most = self.info.shared_per_block;
        if shared as usize > most {
            let reason = format!("{shared} bytes of shared memory, a block has at most {most}");
            return Err(DriverError::Call {
                call: "allow_shared",
                reason,
            });
        }
        self.loaded(kernel)
            .shared_allowed
            .fetch_max(shared, Ordering::Relaxed);
        Ok(())
    }

    fn resident_blocks(&self, kernel: Kernel, threads: u32, shared: u32) -> Result<u32, DriverError> {
        self.shared.check()?;
        let by_threads = (2048 / threads.max(1).next_multiple_of(32)).min(32);
        let by_shared = (self.info.shared_per_multiprocessor / (shared as usize + 1024)) as u32;
        let by_registers = self.loaded(kernel).entry.blocks().max(1);
        Ok(by_threads.min(by_shared).min(by_registers))
    }

    fn allocate(&self, bytes: usize, what: &'static str) -> Result<DevicePtr, DriverError> {
        let (free, total) = self.memory()?;
        let memory = Some(bytes)
            .filter(|&b| b <= free)
            .and_then(|b| Guarded::new(b, 0xff));
        let memory = memory.ok_or(DriverError::OutOfMemory {
            what,
            bytes,
            free,
            total,
        })?;
        Ok(DevicePtr(lock(&self.shared.memory).add(memory, what)))
    }

    fn free(&self, memory: DevicePtr) {
        self.drain();
        let removed = lock(&self.shared.memory).remove(memory.0);
        if let Err(reason) = removed {
            self.report(reason);
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<Pinned, DriverError> {
        let memory = Guarded::new(bytes, 0).ok_or_else(|| DriverError::Call {
            call: "allocate_pinned",
            reason: format!("the system has no {bytes} bytes"),
        })?;
        let host = memory.address();
        lock(&self.pinned).push(memory);
        Ok(Pinned {
            host,
            device: DevicePtr(host as u64),
            len: bytes,
        })
    }

    fn free_pinned(&self, memory: Pinned) {
        self.drain();
        let mut pinned = lock(&self.pinned);
        let found = pinned.iter().position(|p| p.address() == memory.host);
        let intact = found.map(|at| pinned.swap_remove(at).intact());
        drop(pinned);
        match intact {
            Some(true) => {}
            Some(false) => self.report("something wrote beside page-locked memory".to_owned()),
            None => self.report(format!("freed {:?}, which is no page-locked memory", memory.host)),
        }
    }

    fn stream(&self) -> Result<Stream, DriverError> {
        let thread = StreamThread::new().map_err(|e| call_error("stream")(e.to_string()))?;
        let mut streams = lock(&self.streams);
        streams.push(Arc::new(thread));
        Ok(Stream(streams.len() - 1))
    }

    unsafe fn copy_to_device(
        &self,
        stream: Stream,
        to: DevicePtr,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DriverError> {
        self.shared.check()?;
        self.check_range(to, bytes)
            .map_err(call_error("copy_to_device"))?;
        let from = from as u64;
        // SAFETY: `to` was found to be the device's; `from` is the caller's promise.
        self.push(stream, move || unsafe { ffi::copy(to.0, from, bytes) });
        Ok(())
    }

    unsafe fn copy_to_host(
        &self,
        stream: Stream,
        to: *mut u8,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<(), DriverError> {
        self.shared.check()?;
        self.check_range(from, bytes)
            .map_err(call_error("copy_to_host"))?;
        let to = to as u64;
        // SAFETY: `from` was found to be the device's; `to` is the caller's promise.
        self.push(stream, move || unsafe { ffi::copy(to, from.0, bytes) });
        Ok(())
    }

    unsafe fn fill(&self, stream: Stream, to: DevicePtr, value: u8, bytes: usize) -> Result<(), DriverError> {
        self.shared.check()?;
        self.check_range(to, bytes).map_err(call_error("fill"))?;
        // SAFETY: `to` was found to be the device's.
        self.push(stream, move || unsafe { ffi::fill(to.0, value, bytes) });
        Ok(())
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch) -> Result<(), DriverError> {
        self.shared.check()?;
        self.check_launch(launch)?;
        self.line(stream).push(self.job(launch.clone()));
        Ok(())
    }

    unsafe fn graph(&self, _stream: Stream, launches: &[Launch]) -> Result<Graph, DriverError> {
        self.shared.check()?;
        launches.iter().try_for_each(|l| self.check_launch(l))?;
        let mut graphs = lock(&self.graphs);
        graphs.push(launches.into());
        Ok(Graph(graphs.len() - 1))
    }

    unsafe fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<(), DriverError> {
        self.shared.check()?;
        let launches = Arc::clone(&lock(&self.graphs)[graph.0]);
        let line = self.line(stream);
        for launch in launches.iter() {
            line.push(self.job(launch.clone()));
        }
        Ok(())
    }

    fn event(&self) -> Result<Event, DriverError> {
        let mut events = lock(&self.events);
        events.push(Arc::default());
        Ok(Event(events.len() - 1))
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), DriverError> {
        self.shared.check()?;
        let mark = self.mark(event);
        let setting = mark.record();
        // Also after a failure: nobody may wait for ever.
        self.line(stream).push(move || mark.pass(setting));
        Ok(())
    }

    fn stream_wait(&self, stream: Stream, event: Event) -> Result<(), DriverError> {
        self.shared.check()?;
        let mark = self.mark(event);
        let setting = mark.setting();
        self.line(stream).push(move || mark.wait(setting));
        Ok(())
    }

    fn passed(&self, event: Event) -> Result<bool, DriverError> {
        self.shared.check()?;
        Ok(self.mark(event).passed())
    }

    fn elapsed_ms(&self, from: Event, to: Event) -> Result<f32, DriverError> {
        self.shared.check()?;
        let (from, to) = (self.mark(from).when(), self.mark(to).when());
        let (Some(from), Some(to)) = (from, to) else {
            let reason = "an event has not been passed".to_owned();
            return Err(DriverError::Call {
                call: "elapsed_ms",
                reason,
            });
        };
        let ms = |d: Duration| d.as_secs_f32() * 1e3;
        Ok(to.checked_duration_since(from).map_or_else(|| -ms(from - to), ms))
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DriverError> {
        self.line(stream).drain();
        if let Err(reason) = lock(&self.shared.memory).check() {
            self.shared.lose("synchronize", reason);
        }
        self.shared.check()
    }
}

impl Drop for EmulatedDriver {
    fn drop(&mut self) {
        lock(&self.streams).clear();
        let beside = lock(&self.shared.memory).check();
        if let Err(reason) = beside
            && self.shared.check().is_ok()
        {
            self.report(reason);
        }
    }
}
