//! All kernel files for all targets: compiled, written, compared.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use horizon_kernels_cuda::sources::{self, Declaration};

use crate::nvrtc::{Compiled, Nvrtc};
use crate::report::{self, Row};

/// Architectures that get machine code.
const ARCHS: [&str; 5] = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"];
/// What every card from 8.0 on can translate for itself.
const FLOOR: &str = "compute_80";
/// Products and sums are joined only where the source says so, as everywhere in this project.
const OPTIONS: [&str; 3] = ["-std=c++17", "--fmad=false", "--ptxas-options=-v"];
/// Compilations at once.
const JOBS: usize = 2;
/// The version that the images are made with.
const VERSION: (i32, i32) = (12, 8);

/// Where things are.
pub struct Places {
    /// Folder of the crate's sources.
    pub src: PathBuf,
    /// Folder of the compiler.
    pub nvrtc: PathBuf,
    /// Folder of earlier results, or none to compile everything.
    pub cache: Option<PathBuf>,
}

/// Which images to make; an empty list means all.
#[derive(Default)]
pub struct Part {
    /// Parts of file names.
    pub files: Vec<String>,
    /// Targets.
    pub targets: Vec<String>,
}

/// Images, by file name, and what there is to say about them.
pub struct Images {
    /// Uncompressed, by the name of the compressed file.
    pub files: BTreeMap<String, Vec<u8>>,
    /// The text of report.txt.
    pub report: String,
    /// What must not be.
    pub findings: Vec<String>,
    /// Whether these are all that there are.
    pub complete: bool,
}

struct Source {
    /// Path below `src`, with `/`.
    name: String,
    text: String,
    kernels: Vec<Declaration>,
}

struct Task<'a> {
    source: &'a Source,
    target: &'static str,
}

/// Compiles everything, or a part.
pub fn compile(places: &Places, part: &Part) -> Result<Images, String> {
    let nvrtc = Nvrtc::open(&places.nvrtc)?;
    let version = nvrtc.version()?;
    if version != VERSION {
        let ((major, minor), (want, want_minor)) = (version, VERSION);
        return Err(format!(
            "NVRTC is {major}.{minor}; the images are made with {want}.{want_minor}"
        ));
    }
    let targets: Vec<&'static str> = ARCHS
        .into_iter()
        .chain([FLOOR])
        .filter(|t| part.targets.is_empty() || part.targets.iter().any(|want| want == t))
        .collect();
    let mut sources = read(&places.src)?;
    sources.retain(|s| part.files.is_empty() || part.files.iter().any(|want| s.name.contains(want)));
    if targets.is_empty() || sources.is_empty() {
        return Err("no kernel file or no target of that name".to_owned());
    }
    let headers = headers(&places.src)?;
    let of_source = |source| targets.iter().map(move |&target| Task { source, target });
    let tasks: Vec<Task<'_>> = sources.iter().flat_map(of_source).collect();
    let queue = Mutex::new(tasks.iter().enumerate());
    let done = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..JOBS {
            scope.spawn(|| {
                loop {
                    let task = queue.lock().expect("no holder panics").next();
                    let Some((number, task)) = task else { return };
                    let result = one(&nvrtc, task, places, headers);
                    done.lock().expect("no holder panics").insert(number, result);
                }
            });
        }
    });
    let done = done.into_inner().map_err(|e| e.to_string())?;
    let mut compiled = Vec::new();
    let mut errors = Vec::new();
    for result in done.into_values() {
        match result {
            Ok(output) => compiled.push(output),
            Err(error) => errors.push(error),
        }
    }
    // The same mistake on six targets is one mistake.
    errors.dedup();
    if !errors.is_empty() {
        return Err(errors.join("\n"));
    }
    let mut images = collect(&sources, &tasks, compiled);
    images.complete = part.files.is_empty() && part.targets.is_empty();
    Ok(images)
}

fn read(src: &Path) -> Result<Vec<Source>, String> {
    let files = sources::files(src, "cu").map_err(|e| format!("{}: {e}", src.display()))?;
    let mut found = Vec::new();
    for path in files {
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let below = path.strip_prefix(src).map_err(|e| e.to_string())?;
        let name = below.display().to_string().replace('\\', "/");
        let kernels = sources::declarations(&text).map_err(|e| format!("{name}: {e}"))?;
        found.push(Source { name, text, kernels });
    }
    Ok(found)
}

/// Changes when any header does.
fn headers(src: &Path) -> Result<u64, String> {
    let mut hash = DefaultHasher::new();
    for path in sources::files(src, "cuh").map_err(|e| format!("{}: {e}", src.display()))? {
        (
            &path,
            fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?,
        )
            .hash(&mut hash);
    }
    Ok(hash.finish())
}

fn one(nvrtc: &Nvrtc, task: &Task<'_>, places: &Places, headers: u64) -> Result<Compiled, String> {
    let mut options: Vec<String> = OPTIONS.map(str::to_owned).into();
    options.push(format!("--gpu-architecture={}", task.target));
    options.push(format!("--include-path={}", places.src.join("include").display()));
    let mut hash = DefaultHasher::new();
    (VERSION, &options, &task.source.name, &task.source.text, headers).hash(&mut hash);
    let kept = places
        .cache
        .as_ref()
        .map(|c| c.join(format!("{:016x}", hash.finish())));
    if let Some(kept) = &kept
        && let (Ok(image), Ok(log)) = (fs::read(kept), fs::read_to_string(kept.with_extension("log")))
    {
        return Ok(Compiled { image, log });
    }
    let cubin = task.target != FLOOR;
    let compiled = nvrtc.compile(&task.source.text, &task.source.name, &options, cubin)?;
    if let Some(kept) = &kept {
        let wrong = |e: std::io::Error| format!("{}: {e}", kept.display());
        fs::create_dir_all(kept.parent().unwrap_or(kept)).map_err(wrong)?;
        fs::write(kept.with_extension("log"), &compiled.log).map_err(wrong)?;
        fs::write(kept, &compiled.image).map_err(wrong)?;
    }
    Ok(compiled)
}

/// File name of an image: `layers/embed.cu` for sm_90 is `layers-embed.sm_90.cubin.zst`.
fn file_name(source: &str, target: &str) -> String {
    let stem = source.trim_end_matches(".cu").replace('/', "-");
    let kind = if target == FLOOR { "ptx" } else { "cubin" };
    format!("{stem}.{target}.{kind}.zst")
}

fn collect(sources: &[Source], tasks: &[Task<'_>], compiled: Vec<Compiled>) -> Images {
    let mut files = BTreeMap::new();
    let mut findings = Vec::new();
    let mut rows = Vec::new();
    let mut outputs = tasks.iter().zip(compiled);
    for source in sources {
        let mut said: Vec<String> = Vec::new();
        let mut usage = Vec::new();
        for (task, output) in outputs.by_ref().take(tasks.len() / sources.len()) {
            said.extend(report::warnings(&output.log));
            if task.target != FLOOR {
                usage.push((task.target, report::parse(&output.log)));
            }
            files.insert(file_name(&source.name, task.target), output.image);
        }
        said.sort();
        said.dedup();
        findings.extend(said);
        for kernel in &source.kernels {
            let of_kernel = usage
                .iter()
                .map(|(arch, all)| (*arch, all.get(&kernel.name).copied().unwrap_or_default()));
            let row = Row {
                file: source.name.clone(),
                kernel: kernel.clone(),
                usage: of_kernel.collect(),
            };
            findings.extend(row.findings());
            rows.push(row);
        }
    }
    let head = format!(
        "Kernel images by NVRTC {}.{}, {}.\nWritten by horizon-kernels build; see README.md of this crate.",
        VERSION.0,
        VERSION.1,
        OPTIONS.join(" ")
    );
    Images {
        files,
        report: report::table(&head, &rows),
        findings,
        complete: true,
    }
}

/// Writes the images and the report into `folder`, and removes images that are no more.
pub fn write(images: &Images, folder: &Path) -> Result<usize, String> {
    fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let present = stored(folder)?;
    let gone = |name: &&String| images.complete && !images.files.contains_key(*name);
    for name in present.keys().filter(gone) {
        let path = folder.join(name);
        fs::remove_file(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let mut changed = 0;
    for (name, bytes) in &images.files {
        if present.get(name) == Some(bytes) {
            continue;
        }
        changed += 1;
        let path = folder.join(name);
        let packed = zstd::encode_all(&bytes[..], 19).map_err(|e| format!("{name}: {e}"))?;
        replace(&path, &packed)?;
    }
    let path = folder.join("report.txt");
    if images.complete && fs::read_to_string(&path).ok().as_ref() != Some(&images.report) {
        replace(&path, images.report.as_bytes())?;
    }
    Ok(changed)
}

/// Writes a file beside its place and moves it there.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let beside = path.with_extension("part");
    let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path));
    written.map_err(|e| format!("{}: {e}", path.display()))
}

/// The images in `folder`, unpacked.
fn stored(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let mut found = BTreeMap::new();
    for path in sources::files(folder, "zst").map_err(|e| format!("{}: {e}", folder.display()))? {
        let packed = fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let bytes = zstd::decode_all(&packed[..]).map_err(|e| format!("{}: {e}", path.display()))?;
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        found.insert(name, bytes);
    }
    Ok(found)
}

/// How `folder` differs from the images: nothing, or what `build` would change.
pub fn compare(images: &Images, folder: &Path) -> Result<Vec<String>, String> {
    let present = stored(folder)?;
    let mut found = Vec::new();
    for (name, bytes) in &images.files {
        match present.get(name) {
            None => found.push(format!("images/{name} is missing")),
            Some(b) if b != bytes => found.push(format!("images/{name} is not what its source compiles to")),
            Some(_) => {}
        }
    }
    if !images.complete {
        return Ok(found);
    }
    let gone = present.keys().filter(|n| !images.files.contains_key(*n));
    found.extend(gone.map(|name| format!("images/{name} has no source")));
    if fs::read_to_string(folder.join("report.txt")).ok().as_ref() != Some(&images.report) {
        found.push("images/report.txt is not the report of these images".to_owned());
    }
    Ok(found)
}
