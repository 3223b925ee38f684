//! Compiles the kernels: `horizon-kernels build` writes `kernels-cuda/images`, `horizon-kernels check` compares.
//!
//! Needs no card and no toolkit, only NVRTC 12.8.93, which `.ci/kernels` installs.

mod images;
mod nvrtc;
mod report;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

const USAGE: &str = "\
usage: horizon-kernels build|check [--only PART]... [--target TARGET]... [--nvrtc FOLDER] [--images FOLDER]

build   compiles every kernel file for every target and writes images and report.txt
check   compiles everything anew and fails if the images differ, or if a kernel spills, uses local memory or takes
        more registers than the line `// registers: N` above it allows

--only PART      only files whose path below src contains PART; the report is printed, not written
--target TARGET  only sm_80, sm_86, sm_89, sm_90, sm_120 or compute_80; the report is printed, not written
--nvrtc FOLDER   where libnvrtc.so.12 is (default: target/cuda128/nvidia/cuda_nvrtc/lib)
--images FOLDER  where the images are (default: kernels-cuda/images)";

struct Request {
    check: bool,
    part: images::Part,
    nvrtc: PathBuf,
    images: PathBuf,
}

fn request(root: &Path) -> Result<Request, String> {
    let mut words = std::env::args().skip(1);
    let check = match words.next().as_deref() {
        Some("build") => false,
        Some("check") => true,
        Some(other) => return Err(format!("unknown command {other}\n{USAGE}")),
        None => return Err(USAGE.to_owned()),
    };
    let mut request = Request {
        check,
        part: images::Part::default(),
        nvrtc: root.join("../target/cuda128/nvidia/cuda_nvrtc/lib"),
        images: root.join("images"),
    };
    while let Some(flag) = words.next() {
        let mut value = || {
            words
                .next()
                .ok_or_else(|| format!("{flag} needs a value\n{USAGE}"))
        };
        match flag.as_str() {
            "--only" => request.part.files.push(value()?),
            "--target" => request.part.targets.push(value()?),
            "--nvrtc" => request.nvrtc = value()?.into(),
            "--images" => request.images = value()?.into(),
            _ => return Err(format!("unknown flag {flag}\n{USAGE}")),
        }
    }
    Ok(request)
}

fn run() -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let request = request(root)?;
    let start = Instant::now();
    let places = images::Places {
        src: root.join("src"),
        nvrtc: request.nvrtc,
        // A check believes nothing of earlier.
        cache: (!request.check).then(|| root.join("../target/kernel-images")),
    };
    let images = images::compile(&places, &request.part)?;
    let mut findings = images.findings.clone();
    if request.check {
        let differences = images::compare(&images, &request.images)?;
        if !differences.is_empty() {
            findings.extend(differences);
            findings.push("`horizon-kernels build` writes the images of the present sources".to_owned());
        }
    } else {
        if !images.complete {
            println!("{}", images.report);
        }
        let changed = images::write(&images, &request.images)?;
        println!(
            "{changed} of {} images changed, {:.1} s",
            images.files.len(),
            start.elapsed().as_secs_f32()
        );
    }
    if findings.is_empty() {
        println!("{} images, no finding", images.files.len());
        return Ok(());
    }
    Err(findings.join("\n"))
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
