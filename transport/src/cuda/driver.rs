//! The driver's library and the errors of its calls.
//!
//! cudarc opens the library itself at the first call, and panics if it is missing or lacks a
//! function. **Invariant:** [`driver`] is called before any other call. It succeeds only if the
//! library exists and has every function of [`NEEDED`]; optional functions are called only if
//! [`Driver::has`] reports them.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::time::Duration;

use cudarc::driver::sys;

/// Oldest driver whose functions and PTX are supported: that of CUDA 12.0, in the driver's version
/// numbers.
const VERSION_MIN: i32 = 12_000;

/// The functions that are called on every GPU. All are in the drivers of CUDA 12.0.
const NEEDED: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceGetUuid_v2",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuPointerGetAttribute",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernel",
];

/// An error code of the driver, with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaErrorCode {
    /// The number.
    pub code: u32,
    /// `CUDA_ERROR_…`.
    pub name: String,
    /// The driver's description.
    pub text: String,
}

impl std::fmt::Display for CudaErrorCode {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} ({}): {}", self.name, self.code, self.text)
    }
}

/// An error of a GPU or its driver.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "no CUDA driver is here: libcuda.so.1 is not found; install NVIDIA's driver (in a container: run it with GPUs, 'docker run --gpus all'), or use host memory"
    )]
    NoDriver,
    /// The driver lacks a function.
    #[error(
        "the CUDA driver has no function {symbol}; install a driver for CUDA 12.0 or newer (525 or newer)"
    )]
    NoFunction {
        /// The function.
        symbol: &'static str,
    },
    /// The driver is too old for the kernels.
    #[error("the CUDA driver is one for CUDA {}.{}; install one for CUDA 12.0 or newer (525 or newer)", version / 1000, version % 1000 / 10)]
    OldDriver {
        /// The version, as from `cuDriverGetVersion`.
        version: i32,
    },
    /// There is no such GPU.
    #[error(
        "there is no GPU {ordinal}: the CUDA driver shows {gpus} (numbered from 0); give another one, or look at CUDA_VISIBLE_DEVICES and 'nvidia-smi -L'"
    )]
    NoGpu {
        /// The ordinal that was given.
        ordinal: u32,
        /// The number of GPUs.
        gpus: u32,
    },
    /// No visible GPU is the one with the peer's memory.
    #[error(
        "this process does not see GPU {gpu}, which holds the peer's memory; let CUDA_VISIBLE_DEVICES name it in both processes"
    )]
    UnseenGpu {
        /// The GPU.
        gpu: super::GpuId,
    },
    /// One GPU does not reach the other's memory.
    #[error(
        "GPU {ordinal} does not reach memory of GPU {other}; use GPUs that do ('nvidia-smi topo -p2p r'), or take fabric tcp, which stages through host memory"
    )]
    NoPeerAccess {
        /// The GPU of the kernels.
        ordinal: u32,
        /// The GPU of the memory.
        other: u32,
    },
    /// A device supports the memory of one GPU.
    #[error(
        "memory of GPU {other} cannot be registered beside that of GPU {first}; make a group for each GPU"
    )]
    OtherGpu {
        /// The GPU whose memory is registered.
        first: u32,
        /// The GPU whose memory was to be registered.
        other: u32,
    },
    /// The GPU has too little memory.
    #[error(
        "GPU {ordinal} has no {bytes} bytes left; free some, or use less ('nvidia-smi' shows who has it)"
    )]
    OutOfMemory {
        /// The GPU.
        ordinal: u32,
        /// The number of bytes that was requested.
        bytes: usize,
    },
    /// The GPU, or its driver, lacks an ability.
    #[error("GPU {ordinal} cannot {ability}")]
    Unable {
        /// The GPU.
        ordinal: u32,
        /// The ability.
        ability: &'static str,
    },
    /// An address that is not memory of that GPU.
    #[error(
        "address {address:#x} is not memory of GPU {ordinal}; give a pointer that cudaMalloc or cuMemAlloc returned there, or a slice for host memory"
    )]
    NotDeviceMemory {
        /// The GPU.
        ordinal: u32,
        /// The address.
        address: u64,
    },
    /// Memory that its owner has freed.
    #[error(
        "the GPU memory at {address:#x} was freed, or freed and allocated again, while it was in use here; keep it until the buffer is dropped"
    )]
    Freed {
        /// The address.
        address: u64,
    },
    /// Memory that could not be kept when it was detached from peers.
    #[error(
        "the {bytes} bytes of this buffer on GPU {ordinal} were lost when a peer failed: to keep them from that peer they had to be copied, and the GPU had too little free memory; load them from elsewhere, and register less than half of the GPU's memory"
    )]
    Lost {
        /// The GPU.
        ordinal: u32,
        /// Length of the buffer in bytes.
        bytes: usize,
    },
    /// A stream has not reached an event in time.
    #[error(
        "the stream on GPU {ordinal} has not done its earlier work within {} ms; look for a kernel that does not end, or allow more time", .waited.as_millis()
    )]
    Late {
        /// The GPU.
        ordinal: u32,
        /// How long the host waited.
        waited: Duration,
    },
    /// A call failed with another error.
    #[error("{call} failed on GPU {ordinal}: {code}")]
    Call {
        /// The driver's function.
        call: &'static str,
        /// The GPU.
        ordinal: u32,
        /// The error code.
        code: CudaErrorCode,
    },
    /// A call failed that concerns no GPU.
    #[error("{call} failed: {code}; look whether 'nvidia-smi' works")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The error code.
        code: CudaErrorCode,
    },
}

/// A driver that is loaded: its version, its GPUs and its optional functions.
pub(super) struct Driver {
    version: i32,
    gpus: u32,
}

impl Driver {
    /// The number of GPUs that it shows to this process.
    pub(super) fn gpus(&self) -> u32 {
        self.gpus
    }

    /// Whether it has this function, which older drivers lack.
    pub(super) fn has(&self, symbol: &str) -> bool {
        has(symbol)
    }
}

/// The driver, loaded at the first call.
pub(super) fn driver() -> Result<&'static Driver, CudaError> {
    static DRIVER: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
    DRIVER.get_or_init(open).as_ref().map_err(CudaError::clone)
}

/// The CUDA version that the driver is for: 12040 is 12.4.
///
/// # Errors
///
/// See [`CudaError`]: no driver, or one that does not start.
pub fn driver_version() -> Result<i32, CudaError> {
    driver().map(|driver| driver.version)
}

/// The number of GPUs that the driver shows to this process.
///
/// # Errors
///
/// No driver, or one that does not start.
pub fn gpus() -> Result<u32, CudaError> {
    driver().map(Driver::gpus)
}

fn open() -> Result<Driver, CudaError> {
    // SAFETY: it only tries to open the library, whose initialisers are trusted.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    if let Some(&symbol) = NEEDED.iter().find(|symbol| !has(symbol)) {
        return Err(CudaError::NoFunction { symbol });
    }
    // SAFETY: the function is there; zero is the only flag.
    match unsafe { sys::cuInit(0) } {
        sys::CUresult::CUDA_SUCCESS => {}
        // A driver without a GPU: no GPU of any ordinal exists.
        sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            return Ok(Driver { version: 0, gpus: 0 });
        }
        code => return Err(failed("cuInit", code)),
    }
    let (mut version, mut gpus): (c_int, c_int) = (0, 0);
    // SAFETY: the functions are there, and each writes one int.
    unsafe {
        expect("cuDriverGetVersion", sys::cuDriverGetVersion(&mut version))?;
        expect("cuDeviceGetCount", sys::cuDeviceGetCount(&mut gpus))?;
    }
    if version < VERSION_MIN {
        return Err(CudaError::OldDriver { version });
    }
    Ok(Driver { version, gpus: gpus.max(0) as u32 })
}

/// Whether the library, which must be loaded, has the function.
fn has(symbol: &str) -> bool {
    // SAFETY: the library is loaded (the caller asked); the address is not called.
    unsafe { sys::culib().get::<*mut c_void>(symbol.as_bytes()).is_ok() }
}

fn expect(call: &'static str, code: sys::CUresult) -> Result<(), CudaError> {
    if code == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failed(call, code)) }
}

fn failed(call: &'static str, code: sys::CUresult) -> CudaError {
    CudaError::Driver { call, code: describe(code) }
}

/// A code with its name and text.
pub(super) fn describe(code: sys::CUresult) -> CudaErrorCode {
    let text = |function: unsafe fn(sys::CUresult, *mut *const c_char) -> sys::CUresult| {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the function is one of `NEEDED`; it stores a text that stays for ever, or null.
        unsafe {
            let known = function(code, &mut text) == sys::CUresult::CUDA_SUCCESS && !text.is_null();
            if known { CStr::from_ptr(text).to_string_lossy().into_owned() } else { "unknown".to_owned() }
        }
    };
    CudaErrorCode { code: code as u32, name: text(sys::cuGetErrorName), text: text(sys::cuGetErrorString) }
}
