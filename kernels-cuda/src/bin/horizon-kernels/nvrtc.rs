//! NVIDIA's run-time compiler, opened from a folder: an install of the compiler is not asked for.

#![expect(unsafe_code, reason = "a C library opened by name")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;

use libloading::{Library, Symbol};

type Program = *mut c_void;
/// Two outputs of a program have the same pair of functions: its size, and its bytes.
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type BytesOf = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// The opened library.
pub struct Nvrtc {
    library: Library,
}

/// What a compilation gave.
pub struct Compiled {
    /// PTX text or a cubin.
    pub image: Vec<u8>,
    /// What the compiler and the assembler said.
    pub log: String,
}

impl Nvrtc {
    /// Opens `libnvrtc.so.12` in `folder`.
    pub fn open(folder: &Path) -> Result<Self, String> {
        let path = folder.join("libnvrtc.so.12");
        if !path.exists() {
            return Err(format!(
                "{} is missing: .ci/kernels installs it, or name its folder with --nvrtc",
                path.display()
            ));
        }
        // SAFETY: the library's initialisation is NVIDIA's and has no preconditions.
        let library = unsafe { Library::new(&path) }.map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Self { library })
    }

    /// A function of the library.
    ///
    /// # Safety
    /// `T` is the function's type in nvrtc.h.
    unsafe fn function<T>(&self, name: &str) -> Result<Symbol<'_, T>, String> {
        // SAFETY: the caller's promise.
        unsafe { self.library.get(name.as_bytes()) }.map_err(|e| format!("libnvrtc has no {name}: {e}"))
    }

    /// Version as (major, minor); the patch level is not told.
    pub fn version(&self) -> Result<(i32, i32), String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the signature in nvrtc.h; both targets live.
        unsafe {
            let version =
                self.function::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>("nvrtcVersion")?;
            check("nvrtcVersion", version(&raw mut major, &raw mut minor))?;
        }
        Ok((major, minor))
    }

    /// Compiles `source`, which messages call `name`; to a cubin, or to PTX.
    pub fn compile(
        &self,
        source: &str,
        name: &str,
        options: &[String],
        cubin: bool,
    ) -> Result<Compiled, String> {
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

        let c_string = |text: &str| CString::new(text).map_err(|e| format!("{name}: {e}"));
        let (source, c_name) = (c_string(source)?, c_string(name)?);
        let options = options
            .iter()
            .map(|o| c_string(o))
            .collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).map_err(|e| e.to_string())?;
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: signatures as in nvrtc.h; source, name and options outlive the program, which is destroyed below
        // on every way out.
        unsafe {
            let create = self.function::<Create>("nvrtcCreateProgram")?;
            let compile = self.function::<Compile>("nvrtcCompileProgram")?;
            let destroy = self.function::<Destroy>("nvrtcDestroyProgram")?;
            let null = std::ptr::null();
            let created = create(&raw mut program, source.as_ptr(), c_name.as_ptr(), 0, null, null);
            check("nvrtcCreateProgram", created)?;
            let status = compile(program, count, pointers.as_ptr());
            let log = self.output(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog");
            let (size, bytes) = if cubin {
                ("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
            } else {
                ("nvrtcGetPTXSize", "nvrtcGetPTX")
            };
            let image = if status == 0 {
                self.output(program, size, bytes)
            } else {
                Ok(Vec::new())
            };
            destroy(&raw mut program);
            let log = log?;
            let log = String::from_utf8_lossy(log.strip_suffix(b"\0").unwrap_or(&log)).into_owned();
            if status != 0 {
                return Err(format!("{name} does not compile:\n{log}"));
            }
            Ok(Compiled { image: image?, log })
        }
    }

    /// # Safety
    /// `program` is live; the names are those of a pair of functions of the types above.
    unsafe fn output(&self, program: Program, size: &str, bytes: &str) -> Result<Vec<u8>, String> {
        let mut len = 0;
        // SAFETY: the caller's promise; the buffer has the size that the library asked for.
        unsafe {
            check(size, self.function::<SizeOf>(size)?(program, &raw mut len))?;
            let mut out = vec![0u8; len];
            check(
                bytes,
                self.function::<BytesOf>(bytes)?(program, out.as_mut_ptr().cast()),
            )?;
            Ok(out)
        }
    }
}

fn check(call: &str, status: c_int) -> Result<(), String> {
    if status == 0 {
        Ok(())
    } else {
        Err(format!("{call} failed with status {status}"))
    }
}
