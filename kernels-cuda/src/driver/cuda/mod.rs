//! The card, through the installed NVIDIA driver. No toolkit is needed: the kernel images are in this program.

#![expect(unsafe_code, reason = "calls of the CUDA driver API")]

mod api;
mod handles;
mod images;

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUfunction_attribute_enum as FunctionAttribute, CUresult};

use super::{DeviceInfo, DevicePtr, Driver, DriverError, Event, Graph, Kernel, Launch, Pinned, Stream};
use api::check;
use handles::{Context, Function, lock};

/// Launches may overlap from this capability on.
const OVERLAP_CAPABILITY: u32 = 90;

/// An NVIDIA card.
pub struct CudaDriver {
    info: DeviceInfo,
    context: Context,
    /// For fills that an allocation waits for.
    own_stream: Stream,
    bytes: AtomicU64,
    allocations: AtomicU64,
}

impl CudaDriver {
    /// Opens card number `ordinal` and loads all kernels.
    ///
    /// # Errors
    /// [`DriverError::Absent`] without a driver or such a card, [`DriverError::OldDriver`],
    /// [`DriverError::UnsupportedDevice`], [`DriverError::Image`], or any other failure of the driver.
    pub fn open(ordinal: u32) -> Result<Self, DriverError> {
        let (device, info) = api::find_device(ordinal)?;
        let mut context = Context::new(device)?;
        context.load_all(info.capability)?;
        let own_stream = new_stream(&context)?;
        Ok(Self {
            info,
            context,
            own_stream,
            bytes: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
        })
    }

    fn function(&self, kernel: Kernel) -> &Function {
        &self.context.functions[kernel.0]
    }

    fn stream_handle(&self, stream: Stream) -> sys::CUstream {
        lock(&self.context.streams)[stream.0]
    }

    fn event_handle(&self, event: Event) -> sys::CUevent {
        lock(&self.context.events)[event.0]
    }

    /// Fills with one value and waits for it.
    fn fill_now(&self, to: u64, value: u8, bytes: usize) -> Result<(), DriverError> {
        let stream = self.stream_handle(self.own_stream);
        // SAFETY: the caller has just allocated the range, and nobody else knows it.
        unsafe {
            check("cuMemsetD8Async", sys::cuMemsetD8Async(to, value, bytes, stream))?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(stream))
        }
    }

    /// Queues a launch in a stream whose context is current.
    fn enqueue(&self, stream: sys::CUstream, launch: &Launch) -> Result<(), DriverError> {
        let function = self.function(launch.kernel);
        if launch.args.len() != function.args {
            let (name, given, wants) = (&function.name, launch.args.len(), function.args);
            let reason = format!("{name}: {given} bytes of arguments, its struct has {wants}");
            return Err(DriverError::Call {
                call: "cuLaunchKernelEx",
                reason,
            });
        }
        let mut attributes = [const { EMPTY }; 2];
        let mut count = 0;
        if launch.overlaps && self.info.capability >= OVERLAP_CAPABILITY {
            attributes[count].id =
                sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        if launch.cooperative {
            attributes[count].id = sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
            attributes[count].value.cooperative = 1;
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        let mut parameters = [launch.args.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: configuration, attributes and arguments outlive the call, which copies the arguments; their size was
        // checked; what they point to is the promise of `launch` and `graph`.
        let result = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                function.handle,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernelEx", result).map_err(|e| match e {
            DriverError::Call { call, reason } => DriverError::Call {
                call,
                reason: format!("{}: {reason}", function.name),
            },
            other => other,
        })
    }

    /// Captures the launches as a graph that is not yet instantiated.
    fn capture(&self, stream: sys::CUstream, launches: &[Launch]) -> Result<sys::CUgraph, DriverError> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream lives as long as the driver; the target lives. The capture is ended on every way out.
        unsafe {
            check("cuStreamBeginCapture", sys::cuStreamBeginCapture_v2(stream, mode))?;
            let queued = launches
                .iter()
                .try_for_each(|launch| self.enqueue(stream, launch));
            let ended = check(
                "cuStreamEndCapture",
                sys::cuStreamEndCapture(stream, &raw mut graph),
            );
            if let Err(error) = queued.and(ended) {
                if !graph.is_null() {
                    sys::cuGraphDestroy(graph);
                }
                return Err(error);
            }
        }
        Ok(graph)
    }
}

/// An attribute that says nothing.
const EMPTY: sys::CUlaunchAttribute = sys::CUlaunchAttribute {
    id: sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_IGNORE,
    pad: [0; 4],
    value: sys::CUlaunchAttributeValue { pad: [0; 64] },
};

fn new_stream(context: &Context) -> Result<Stream, DriverError> {
    context.bind()?;
    let mut stream = std::ptr::null_mut();
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: the context is current; the target lives.
    check("cuStreamCreate", unsafe {
        sys::cuStreamCreate(&raw mut stream, flags)
    })?;
    let mut streams = lock(&context.streams);
    streams.push(stream);
    Ok(Stream(streams.len() - 1))
}

impl Driver for CudaDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<(usize, usize), DriverError> {
        self.context.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; both targets live.
        check("cuMemGetInfo", unsafe {
            sys::cuMemGetInfo_v2(&raw mut free, &raw mut total)
        })?;
        Ok((free, total))
    }

    fn allocated(&self) -> (u64, u64) {
        (
            self.bytes.load(Ordering::Relaxed),
            self.allocations.load(Ordering::Relaxed),
        )
    }

    fn kernel(&self, name: &str) -> Result<Kernel, DriverError> {
        let found = self.context.by_name.get(name).copied();
        found
            .map(Kernel)
            .ok_or_else(|| DriverError::Image(format!("no kernel {name}")))
    }

    fn allow_shared(&self, kernel: Kernel, shared: u32) -> Result<(), DriverError> {
        let function = self.function(kernel);
        if function.shared_allowed.load(Ordering::Relaxed) >= shared {
            return Ok(());
        }
        let most = self.info.shared_per_block;
        if shared as usize > most {
            let reason = format!(
                "{}: {shared} bytes of shared memory, a block of {} has at most {most}",
                function.name, self.info.name
            );
            return Err(DriverError::Call {
                call: "cuFuncSetAttribute",
                reason,
            });
        }
        self.context.bind()?;
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is of a loaded module. The size fits an i32: it is at most what a block has.
        let set = unsafe { sys::cuFuncSetAttribute(function.handle, attribute, shared as c_int) };
        check("cuFuncSetAttribute", set)?;
        function.shared_allowed.fetch_max(shared, Ordering::Relaxed);
        Ok(())
    }

    fn resident_blocks(&self, kernel: Kernel, threads: u32, shared: u32) -> Result<u32, DriverError> {
        self.context.bind()?;
        let (function, mut blocks) = (self.function(kernel).handle, 0);
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        // SAFETY: the function is of a loaded module; the target lives.
        let asked = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                function,
                threads,
                shared as usize,
            )
        };
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", asked)?;
        Ok(blocks.unsigned_abs())
    }

    fn allocate(&self, bytes: usize, what: &'static str) -> Result<DevicePtr, DriverError> {
        self.context.bind()?;
        let mut address = 0;
        // SAFETY: the context is current; the target lives. The driver refuses a size of zero.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.max(1)) };
        if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = self.memory()?;
            return Err(DriverError::OutOfMemory {
                what,
                bytes,
                free,
                total,
            });
        }
        check("cuMemAlloc", result)?;
        lock(&self.context.memory).insert(address, bytes);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.allocations.fetch_add(1, Ordering::Relaxed);
        if bytes > 0 {
            self.fill_now(address, 0xff, bytes)?;
        }
        Ok(DevicePtr(address))
    }

    fn free(&self, memory: DevicePtr) {
        let known = lock(&self.context.memory).remove(&memory.0).is_some();
        debug_assert!(known, "{memory:?} is no allocation of this driver");
        if known && self.context.bind().is_ok() {
            // SAFETY: an allocation of ours, freed once; the driver waits for work that uses it. A failure means that
            // the device is lost, which the next call says.
            unsafe { sys::cuMemFree_v2(memory.0) };
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<Pinned, DriverError> {
        self.context.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let (mut host, mut device) = (std::ptr::null_mut::<c_void>(), 0);
        // SAFETY: the context is current; targets live; the fill stays within what was just allocated.
        unsafe {
            check(
                "cuMemHostAlloc",
                sys::cuMemHostAlloc(&raw mut host, bytes.max(1), flags),
            )?;
            lock(&self.context.pinned).push(host);
            host.cast::<u8>().write_bytes(0, bytes);
            let mapped = sys::cuMemHostGetDevicePointer_v2(&raw mut device, host, 0);
            check("cuMemHostGetDevicePointer", mapped)?;
        }
        Ok(Pinned {
            host: host.cast(),
            device: DevicePtr(device),
            len: bytes,
        })
    }

    fn free_pinned(&self, memory: Pinned) {
        let mut pinned = lock(&self.context.pinned);
        let found = pinned.iter().position(|p| *p == memory.host.cast());
        debug_assert!(found.is_some(), "{memory:?} is no memory of this driver");
        let Some(at) = found else { return };
        let host = pinned.swap_remove(at);
        drop(pinned);
        if self.context.bind().is_ok() {
            // SAFETY: an allocation of ours, freed once; see `free`.
            unsafe { sys::cuMemFreeHost(host) };
        }
    }

    fn stream(&self) -> Result<Stream, DriverError> {
        new_stream(&self.context)
    }

    unsafe fn copy_to_device(
        &self,
        stream: Stream,
        to: DevicePtr,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DriverError> {
        self.context.bind()?;
        let stream = self.stream_handle(stream);
        // SAFETY: the caller's promise; the stream lives as long as the driver.
        let queued = unsafe { sys::cuMemcpyHtoDAsync_v2(to.0, from.cast(), bytes, stream) };
        check("cuMemcpyHtoDAsync", queued)
    }

    unsafe fn copy_to_host(
        &self,
        stream: Stream,
        to: *mut u8,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<(), DriverError> {
        self.context.bind()?;
        let stream = self.stream_handle(stream);
        // SAFETY: the caller's promise; the stream lives as long as the driver.
        let queued = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from.0, bytes, stream) };
        check("cuMemcpyDtoHAsync", queued)
    }

    unsafe fn fill(&self, stream: Stream, to: DevicePtr, value: u8, bytes: usize) -> Result<(), DriverError> {
        self.context.bind()?;
        let stream = self.stream_handle(stream);
        // SAFETY: the caller's promise; the stream lives as long as the driver.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(to.0, value, bytes, stream)
        })
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch) -> Result<(), DriverError> {
        self.context.bind()?;
        self.enqueue(self.stream_handle(stream), launch)
    }

    unsafe fn graph(&self, stream: Stream, launches: &[Launch]) -> Result<Graph, DriverError> {
        self.context.bind()?;
        let stream = self.stream_handle(stream);
        let captured = self.capture(stream, launches)?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the captured graph is whole and destroyed once; the target lives.
        unsafe {
            let made = sys::cuGraphInstantiateWithFlags(&raw mut graph, captured, 0);
            sys::cuGraphDestroy(captured);
            check("cuGraphInstantiate", made)?;
        }
        let mut graphs = lock(&self.context.graphs);
        graphs.push(graph);
        let place = graphs.len() - 1;
        drop(graphs);
        // SAFETY: the graph was just made; the stream lives as long as the driver.
        check("cuGraphUpload", unsafe { sys::cuGraphUpload(graph, stream) })?;
        Ok(Graph(place))
    }

    unsafe fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<(), DriverError> {
        self.context.bind()?;
        let (stream, graph) = (self.stream_handle(stream), lock(&self.context.graphs)[graph.0]);
        // SAFETY: both live as long as the driver; what the kernels touch is the promise of `graph`.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph, stream) })
    }

    fn event(&self) -> Result<Event, DriverError> {
        self.context.bind()?;
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32;
        // SAFETY: the context is current; the target lives.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&raw mut event, flags)
        })?;
        let mut events = lock(&self.context.events);
        events.push(event);
        Ok(Event(events.len() - 1))
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), DriverError> {
        self.context.bind()?;
        let (event, stream) = (self.event_handle(event), self.stream_handle(stream));
        // SAFETY: both live as long as the driver.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event, stream) })
    }

    fn stream_wait(&self, stream: Stream, event: Event) -> Result<(), DriverError> {
        self.context.bind()?;
        let (event, stream) = (self.event_handle(event), self.stream_handle(stream));
        // SAFETY: both live as long as the driver.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(stream, event, 0)
        })
    }

    fn passed(&self, event: Event) -> Result<bool, DriverError> {
        self.context.bind()?;
        // SAFETY: the event lives as long as the driver.
        match unsafe { sys::cuEventQuery(self.event_handle(event)) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check("cuEventQuery", other).map(|()| true),
        }
    }

    fn elapsed_ms(&self, from: Event, to: Event) -> Result<f32, DriverError> {
        self.context.bind()?;
        let (from, to, mut ms) = (self.event_handle(from), self.event_handle(to), 0.0);
        // SAFETY: both events live as long as the driver; the target lives. The driver is 12.8, which has this call.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime_v2(&raw mut ms, from, to)
        })?;
        Ok(ms)
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DriverError> {
        self.context.bind()?;
        // SAFETY: the stream lives as long as the driver.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.stream_handle(stream))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a card: it opens. Without: the error says that there is none.
    #[test]
    fn a_machine_without_a_card_is_told_so() {
        match CudaDriver::open(0) {
            Ok(driver) => assert!(driver.info().capability >= 80),
            Err(error) => {
                assert!(matches!(error, DriverError::Absent(_)), "{error}");
                assert!(error.to_string().starts_with("no CUDA device: "), "{error}");
            }
        }
        assert!(matches!(CudaDriver::open(1000), Err(DriverError::Absent(_))));
    }
}
