//! What the driver has given us and what must be given back: context, modules, memory, streams, events, graphs.

#![expect(unsafe_code, reason = "calls of the CUDA driver API")]

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUfunction_attribute_enum as FunctionAttribute};

use super::api::{check, is_image, words};
use super::images;
use crate::driver::DriverError;

/// Locks also after a panic elsewhere: every change to what is guarded here is one step.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A loaded kernel.
pub struct Function {
    pub name: String,
    pub handle: sys::CUfunction,
    /// Bytes of its argument struct.
    pub args: usize,
    /// Dynamic shared memory that launches may ask for.
    pub shared_allowed: AtomicU32,
}

/// The device's primary context with all that was made in it. Dropping it gives everything back.
pub struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    modules: Vec<sys::CUmodule>,
    pub functions: Vec<Function>,
    pub by_name: HashMap<String, usize>,
    pub memory: Mutex<HashMap<u64, usize>>,
    pub pinned: Mutex<Vec<*mut c_void>>,
    pub streams: Mutex<Vec<sys::CUstream>>,
    pub events: Mutex<Vec<sys::CUevent>>,
    pub graphs: Mutex<Vec<sys::CUgraphExec>>,
}

// SAFETY: handles are opaque names; the driver API may be called with them from any thread once the context is current
// there, which `bind` sees to.
unsafe impl Send for Context {}
// SAFETY: as above; the lists are behind locks.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of `device`.
    pub fn new(device: sys::CUdevice) -> Result<Self, DriverError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the device was found by cuDeviceGet; the target lives.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check("cuDevicePrimaryCtxRetain", retained)?;
        let this = Self {
            device,
            context,
            modules: Vec::new(),
            functions: Vec::new(),
            by_name: HashMap::new(),
            memory: Mutex::default(),
            pinned: Mutex::default(),
            streams: Mutex::default(),
            events: Mutex::default(),
            graphs: Mutex::default(),
        };
        this.bind()?;
        Ok(this)
    }

    /// Makes the context current in this thread.
    pub fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained until drop.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Loads every kernel for a card of that capability, so that no launch has to.
    pub fn load_all(&mut self, capability: u32) -> Result<(), DriverError> {
        for of_file in images::candidates(capability)? {
            let module = load(&of_file)?;
            self.modules.push(module);
            for handle in functions(module)? {
                let function = prepare(handle)?;
                self.by_name.insert(function.name.clone(), self.functions.len());
                self.functions.push(function);
            }
        }
        Ok(())
    }
}

/// Loads the first image that the driver takes.
fn load(of_file: &images::Candidates) -> Result<sys::CUmodule, DriverError> {
    let mut refused = Vec::new();
    for &image in &of_file.images {
        let bytes = images::unpack(image)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: a context is current; the image is a whole cubin, or PTX that ends with a zero; the driver copies it.
        let result = unsafe { sys::cuModuleLoadData(&raw mut module, bytes.as_ptr().cast()) };
        if !is_image(result) {
            return check("cuModuleLoadData", result).map(|()| module);
        }
        refused.push(format!("{}: {}", images::name(image), words(result)));
    }
    Err(DriverError::Image(refused.join("; ")))
}

/// All kernels of a module.
fn functions(module: sys::CUmodule) -> Result<Vec<sys::CUfunction>, DriverError> {
    let mut count = 0;
    // SAFETY: the module is loaded; the driver is 12.8 or later, which has these calls; the list has the size asked for.
    unsafe {
        check(
            "cuModuleGetFunctionCount",
            sys::cuModuleGetFunctionCount(&raw mut count, module),
        )?;
        let mut handles = vec![std::ptr::null_mut(); count as usize];
        let listed = sys::cuModuleEnumerateFunctions(handles.as_mut_ptr(), count, module);
        check("cuModuleEnumerateFunctions", listed)?;
        Ok(handles)
    }
}

/// Loads a kernel for good and learns its name and the size of its argument.
fn prepare(handle: sys::CUfunction) -> Result<Function, DriverError> {
    let mut name = std::ptr::null();
    let (mut offset, mut args) = (0, 0);
    let carveout = FunctionAttribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
    let maximum = sys::CUshared_carveout_enum::CU_SHAREDMEM_CARVEOUT_MAX_SHARED as i32;
    // SAFETY: the handle is of a loaded module; targets live; the name is the module's and is copied here.
    unsafe {
        check("cuFuncLoad", sys::cuFuncLoad(handle))?;
        check("cuFuncGetName", sys::cuFuncGetName(&raw mut name, handle))?;
        check(
            "cuFuncGetParamInfo",
            sys::cuFuncGetParamInfo(handle, 0, &raw mut offset, &raw mut args),
        )?;
        check(
            "cuFuncSetAttribute",
            sys::cuFuncSetAttribute(handle, carveout, maximum),
        )?;
        let name = CStr::from_ptr(name).to_string_lossy().into_owned();
        Ok(Function {
            name,
            handle,
            args,
            shared_allowed: AtomicU32::new(48 << 10),
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Results do not matter: after a fault every call fails, and the context takes all with it.
        // SAFETY: each handle is given back once and used by nobody any more (`&mut self`); what is still queued ends
        // first.
        unsafe {
            sys::cuCtxSetCurrent(self.context);
            sys::cuCtxSynchronize();
            for graph in lock(&self.graphs).drain(..) {
                sys::cuGraphExecDestroy(graph);
            }
            for event in lock(&self.events).drain(..) {
                sys::cuEventDestroy_v2(event);
            }
            for stream in lock(&self.streams).drain(..) {
                sys::cuStreamDestroy_v2(stream);
            }
            for (address, _) in lock(&self.memory).drain() {
                sys::cuMemFree_v2(address);
            }
            for memory in lock(&self.pinned).drain(..) {
                sys::cuMemFreeHost(memory);
            }
            for module in self.modules.drain(..) {
                sys::cuModuleUnload(module);
            }
            sys::cuCtxSetCurrent(std::ptr::null_mut());
            sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}
