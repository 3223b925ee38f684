//! Results of driver calls as errors, and the device's properties.

#![expect(unsafe_code, reason = "calls of the CUDA driver API")]

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUresult};

use crate::driver::{DeviceInfo, DriverError};

/// CUDA 12.8, whose machine code and PTX the images are.
const OLDEST_DRIVER: i32 = 12080;
const OLDEST_CAPABILITY: u32 = 80;

/// An error, if the call failed.
pub fn check(call: &'static str, result: CUresult) -> Result<(), DriverError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let reason = words(result);
    Err(if is_lost(result) {
        DriverError::Lost { call, reason }
    } else {
        DriverError::Call { call, reason }
    })
}

/// The driver's own words for a result.
pub fn words(result: CUresult) -> String {
    let text = |read: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: every caller of this module has made sure that the driver is present; a text that it gives is
        // constant.
        unsafe {
            read(result, &raw mut text);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let name = text(sys::cuGetErrorName).unwrap_or_else(|| format!("CUDA error {}", result as u32));
    match text(sys::cuGetErrorString) {
        Some(sentence) => format!("{sentence} ({name})"),
        None => name,
    }
}

/// Results after which the process can no longer use the device.
fn is_lost(result: CUresult) -> bool {
    matches!(
        result,
        CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

/// Whether an image failed to load because of what it is, so that another may do.
pub fn is_image(result: CUresult) -> bool {
    matches!(
        result,
        CUresult::CUDA_ERROR_INVALID_IMAGE
            | CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUresult::CUDA_ERROR_INVALID_PTX
            | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND
            | CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED
            | CUresult::CUDA_ERROR_INVALID_SOURCE
            | CUresult::CUDA_ERROR_SHARED_OBJECT_INIT_FAILED
    )
}

/// Starts the driver and finds a card that the kernels are made for.
pub fn find_device(ordinal: u32) -> Result<(sys::CUdevice, DeviceInfo), DriverError> {
    let absent = |reason: &str| DriverError::Absent(reason.to_owned());
    // SAFETY: opens a library by name, which runs NVIDIA's initialisation.
    if !unsafe { sys::is_culib_present() } {
        return Err(absent("no NVIDIA driver is installed (libcuda was not found)"));
    }
    let mut driver = 0;
    // SAFETY: this call is in every driver and may come before cuInit; the target lives.
    let result = unsafe { sys::cuDriverGetVersion(&raw mut driver) };
    // A library for linking only, without a driver behind it, knows no version.
    if result != CUresult::CUDA_SUCCESS || driver == 0 {
        return Err(DriverError::Absent(format!(
            "the NVIDIA driver does not start: {}",
            words(result)
        )));
    }
    if driver < OLDEST_DRIVER {
        return Err(DriverError::OldDriver { found: driver });
    }
    // SAFETY: no preconditions.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => {}
        CUresult::CUDA_ERROR_NO_DEVICE => return Err(absent("the NVIDIA driver finds no card")),
        other => {
            return Err(DriverError::Absent(format!(
                "the NVIDIA driver does not start: {}",
                words(other)
            )));
        }
    }
    let (mut count, mut device) = (0, 0);
    // SAFETY: the driver has started; both targets live.
    unsafe {
        check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
        let wanted = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        if wanted >= count {
            return Err(DriverError::Absent(format!(
                "card {ordinal} was asked for, there are {count}"
            )));
        }
        check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, wanted))?;
    }
    let info = describe(device, driver)?;
    if info.capability < OLDEST_CAPABILITY {
        return Err(DriverError::UnsupportedDevice {
            name: info.name,
            capability: info.capability,
        });
    }
    Ok((device, info))
}

fn describe(device: sys::CUdevice, driver: i32) -> Result<DeviceInfo, DriverError> {
    let attribute = |which| {
        let mut value: c_int = 0;
        // SAFETY: the device was found by cuDeviceGet; the target lives.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&raw mut value, which, device)
        })?;
        Ok::<u32, DriverError>(value.unsigned_abs())
    };
    let mut name = [0u8; 256];
    let mut memory_bytes = 0;
    // SAFETY: as above; the length is the buffer's.
    unsafe {
        let length = c_int::try_from(name.len()).unwrap_or(0);
        check(
            "cuDeviceGetName",
            sys::cuDeviceGetName(name.as_mut_ptr().cast(), length, device),
        )?;
        check(
            "cuDeviceTotalMem",
            sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, device),
        )?;
    }
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
    let (major, minor) = (
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    let shared_per_block = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?;
    Ok(DeviceInfo {
        name: name.to_string_lossy().into_owned(),
        capability: 10 * major + minor,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_per_block: shared_per_block as usize,
        shared_per_multiprocessor: shared as usize,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        memory_bytes,
        driver,
    })
}
