//! Lists the kernel images for embedding and, with the feature `emulator`, compiles the kernel sources for the host.

use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

#[cfg(feature = "emulator")]
#[path = "emulator/compile.rs"]
mod compile;
#[cfg(feature = "emulator")]
#[path = "src/sources.rs"]
mod sources;

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").ok_or("cargo names no package folder")?);
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo names no output folder")?);
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=images");
    list_images(&root.join("images"), &out.join("images.rs"))?;
    #[cfg(feature = "emulator")]
    compile::all(&root, &out, &std::env::var("TARGET")?)?;
    Ok(())
}

/// Writes an array of (file name, bytes) of everything in `images` that is compressed.
fn list_images(images: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(images).map_err(|e| format!("{}: {e}", images.display()))? {
        let name = entry?
            .file_name()
            .into_string()
            .map_err(|n| format!("{n:?}: not UTF-8"))?;
        if name.ends_with(".zst") {
            names.push(name);
        }
    }
    names.sort();
    let mut text = String::from("&[\n");
    for name in &names {
        let path = images.join(name);
        writeln!(text, "    ({name:?}, include_bytes!({path:?})),")?;
    }
    text.push_str("]\n");
    fs::write(to, text)?;
    Ok(())
}
