//! Compiles each kernel file, in a namespace of its own, and the fibers that run it, by the host's C++ compiler.

use std::collections::hash_map::DefaultHasher;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use crate::sources;

const FLAGS: &[&str] = &[
    "-O2",
    "-std=c++17",
    "-mf16c",
    "-mfma",
    "-ffp-contract=off",
    "-ftls-model=initial-exec",
    "-fno-exceptions",
    // A large frame must meet the page below the stack, not leap over it.
    "-fstack-clash-protection",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-unused-parameter",
    "-Wno-unused-const-variable",
    "-DHZ_EMULATED",
];
/// Compilers at once.
const JOBS: usize = 2;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// One translation unit.
struct Unit {
    source: PathBuf,
    object: PathBuf,
    /// Of everything that it is made of.
    hash: u64,
}

/// Compiles what has changed into a library that the crate is linked with.
pub fn all(root: &Path, out: &Path, target: &str) -> Outcome<()> {
    if !target.starts_with("x86_64-") || !target.contains("-linux-") {
        return Err("the feature `emulator` works on x86-64 Linux only: build without it".into());
    }
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rerun-if-changed=emulator");
    let out = out.join("emulator");
    fs::create_dir_all(&out)?;
    let compiler = cc::Build::new().cpp(true).get_compiler();
    let units = units(root, &out, compiler.path())?;

    let stale: Vec<&Unit> = units.iter().filter(|u| !u.fresh()).collect();
    let next = Mutex::new(stale.iter());
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..JOBS {
            scope.spawn(|| {
                loop {
                    let Some(unit) = next.lock().expect("no panic holds it").next() else {
                        return;
                    };
                    if let Err(error) = unit.compile(compiler.to_command(), root) {
                        failures.lock().expect("no panic holds it").push(error);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner()?;
    if !failures.is_empty() {
        return Err(failures.join("\n").into());
    }

    let mut library = cc::Build::new();
    library.cpp(true).cargo_warnings(false);
    for unit in &units {
        library.object(&unit.object);
    }
    library.compile("horizon_emulated");
    Ok(())
}

/// The kernel files, the table of their kernels, and the emulator itself.
fn units(root: &Path, out: &Path, compiler: &Path) -> Outcome<Vec<Unit>> {
    let mut common = DefaultHasher::new();
    (FLAGS, compiler).hash(&mut common);
    for (folder, extension) in [("src", "cuh"), ("emulator", "h")] {
        for file in sources::files(&root.join(folder), extension)? {
            (&file, fs::read(&file)?).hash(&mut common);
        }
    }
    let common = common.finish();
    let mut units = Vec::new();
    let mut names: Vec<(String, PathBuf)> = Vec::new();
    let mut add = |source: PathBuf, stem: &str| -> Outcome<()> {
        let mut hash = DefaultHasher::new();
        (common, fs::read(&source)?).hash(&mut hash);
        let object = out.join(format!("{stem}.o"));
        units.push(Unit {
            source,
            object,
            hash: hash.finish(),
        });
        Ok(())
    };
    let mut kernels = sources::files(&root.join("src"), "cu")?;
    kernels.extend(sources::files(&root.join("emulator"), "cu")?);
    for file in kernels {
        let text = fs::read_to_string(&file)?;
        let found = sources::declarations(&text).map_err(|e| format!("{}: {e}", file.display()))?;
        for kernel in &found {
            if let Some((_, other)) = names.iter().find(|(name, _)| *name == kernel.name) {
                let name = &kernel.name;
                return Err(format!(
                    "kernel {name} is in {} and in {}",
                    other.display(),
                    file.display()
                )
                .into());
            }
            names.push((kernel.name.clone(), file.clone()));
        }
        let stem = file
            .strip_prefix(root)?
            .with_extension("")
            .display()
            .to_string()
            .replace('/', "-");
        let wrapper = out.join(format!("{stem}.cpp"));
        fs::write(&wrapper, wrap(&file, &text, &found)?)?;
        add(wrapper, &stem)?;
    }
    let table = out.join("table.cpp");
    fs::write(&table, self::table(&names)?)?;
    add(table, "table")?;
    for file in sources::files(&root.join("emulator"), "cpp")? {
        let stem = format!("emulator-{}", file.file_stem().unwrap_or_default().display());
        add(file, &stem)?;
    }
    Ok(units)
}

/// A kernel file within a namespace, followed by an entry for each kernel. The text itself is only there to be hashed.
fn wrap(file: &Path, text: &str, kernels: &[sources::Declaration]) -> Outcome<String> {
    let mut hash = DefaultHasher::new();
    text.hash(&mut hash);
    let mut wrapper = format!(
        "// {:x}\n#include \"emulated.h\"\nnamespace {{\n#include {:?}\n}}\n",
        hash.finish(),
        file.display().to_string()
    );
    for kernel in kernels {
        let sources::Declaration {
            name,
            threads,
            blocks,
            args,
            ..
        } = kernel;
        writeln!(
            wrapper,
            "extern \"C\" const hz_kernel hz_kernel_{name};\n\
             const hz_kernel hz_kernel_{name} = {{\"{name}\", {threads}, {blocks}, sizeof({args}),\n    \
             [](const void *args) {{ {name}(*static_cast<const {args} *>(args)); }}}};"
        )?;
    }
    Ok(wrapper)
}

fn table(names: &[(String, PathBuf)]) -> Outcome<String> {
    let mut text = String::from("#include \"fibers.h\"\nextern \"C\" {\n");
    for (name, _) in names {
        writeln!(text, "extern const hz_kernel hz_kernel_{name};")?;
    }
    text.push_str("extern const hz_kernel *const hz_kernels[] = {");
    for (name, _) in names {
        write!(text, "&hz_kernel_{name}, ")?;
    }
    writeln!(
        text,
        "nullptr}};\nextern const size_t hz_kernel_count = {};\n}}",
        names.len()
    )?;
    Ok(text)
}

impl Unit {
    fn stamp(&self) -> PathBuf {
        self.object.with_extension("hash")
    }

    fn fresh(&self) -> bool {
        self.object.exists() && fs::read_to_string(self.stamp()).is_ok_and(|s| s == self.hash.to_string())
    }

    fn compile(&self, mut command: Command, root: &Path) -> Result<(), String> {
        command.args(FLAGS);
        command
            .arg("-I")
            .arg(root.join("emulator"))
            .arg("-I")
            .arg(root.join("src/include"));
        command.arg("-c").arg(&self.source).arg("-o").arg(&self.object);
        let run = command
            .output()
            .map_err(|e| format!("{:?}: {e}", command.get_program()))?;
        let said = String::from_utf8_lossy(&run.stderr);
        if !run.status.success() {
            return Err(format!(
                "{}: the C++ compiler failed\n{said}",
                self.source.display()
            ));
        }
        for line in said.lines().filter(|l| l.contains("warning:")) {
            println!("cargo:warning={line}");
        }
        fs::write(self.stamp(), self.hash.to_string()).map_err(|e| e.to_string())
    }
}
