//! The fake CUDA driver for tests (`driver.c` says what it is), built by the C compiler when a test
//! wants it.
//!
//! It is found in place of a real one: `load` opens it under the name that the driver is looked for
//! by, and [`folder`] is for `LD_LIBRARY_PATH` of processes that tests start.
#![allow(dead_code, reason = "each test takes what it needs")]
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The file name under which the driver is looked for first; also the name inside of the library.
const NAME: &str = "libcuda.so";

/// Where the fake driver lies.
pub(crate) fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(build)
}

/// Opens the fake driver in this process, before anybody looks for a real one.
pub(crate) fn load() {
    static LOADED: OnceLock<()> = OnceLock::new();
    LOADED.get_or_init(|| {
        let path = folder().join(NAME).into_os_string().into_string().expect("a path of text");
        let path = CString::new(path).expect("a path without zeros");
        // SAFETY: a text that ends with zero; the library has no initialisers. It stays open for
        // ever, so that the driver's name leads to it.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!handle.is_null(), "the fake driver does not load");
    });
}

/// How many kernels this process has launched, and how many copies it has begun, with the fake
/// driver, which it has found as its driver.
pub(crate) fn launches_and_copies() -> [i64; 2] {
    [c"fakeCudaLaunches", c"fakeCudaCopies"].map(count)
}

fn count(counter: &CStr) -> i64 {
    let name = CString::new(NAME).expect("a name without zeros");
    // SAFETY: texts that end with zero; the library is open already and stays so.
    let function = unsafe {
        let handle = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        assert!(!handle.is_null(), "the fake driver is not this process's driver");
        libc::dlsym(handle, counter.as_ptr())
    };
    assert!(!function.is_null(), "the driver is not the fake one");
    // SAFETY: the fake driver's functions of these names take nothing and return a `long`.
    let function: extern "C" fn() -> libc::c_long = unsafe { std::mem::transmute(function) };
    function()
}

fn build() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = "transport/tests/fake_cuda/driver.c";
    let root = own.ancestors().find(|folder| folder.join(source).exists()).expect("the repository");
    let kernels = root.join("collectives/src/compute/cuda/reduce.cu");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-cuda");
    std::fs::create_dir_all(&folder).expect("a folder for what tests build");
    // Several test programs may build it at once: each one's is put in place whole.
    let own = folder.join(format!("{NAME}.{}", std::process::id()));
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(compiler)
        .args(["-shared", "-fPIC", "-O1", "-ffp-contract=off", "-pthread", "-Wl,-soname,libcuda.so"])
        .arg(format!("-DKERNELS=\"{}\"", kernels.display()))
        .args(["-x", "c"])
        .arg(root.join(source))
        .arg("-o")
        .arg(&own)
        .arg("-ldl")
        .status()
        .expect("a C compiler");
    assert!(status.success(), "the fake driver does not compile");
    std::fs::rename(&own, folder.join(NAME)).expect("a place for the fake driver");
    folder
}
