//! The runtime onnxruntime, from its shared library, which is opened at run time.
//!
//! Its table of C functions has a version; a library gives every older one. Inputs are bound where
//! they are, and outputs of known size are bound to the places that they are sent from. So nothing
//! is copied.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ort_sys::{
    GraphOptimizationLevel, ONNXTensorElementDataType, OrtAllocator, OrtAllocatorType, OrtApi, OrtApiBase,
    OrtEnv, OrtIoBinding, OrtLoggingLevel, OrtMemType, OrtMemoryInfo, OrtSession, OrtSessionOptions,
    OrtStatus, OrtStatusPtr, OrtTensorTypeAndShapeInfo, OrtValue,
};

use super::channels::TensorForm;
use super::runtime::{Output, Place, Program, Runtime, RuntimeError, TensorRef, Values};
use crate::element::ElementType;

const NAME: &str = "onnxruntime";

/// The version of the table of functions: that of the types of `ort-sys` as built here.
const API_VERSION: u32 = 17;

/// The variable that names the library.
const LIBRARY_VARIABLE: &str = "ORT_DYLIB_PATH";

/// Its usual name, which the system's linker looks for.
const LIBRARY: &str = "libonnxruntime.so.1";

/// The runtime onnxruntime.
#[derive(Clone)]
pub struct Onnxruntime {
    library: Arc<Library>,
}

impl std::fmt::Debug for Onnxruntime {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Onnxruntime")
    }
}

/// The opened library. It stays open until the process ends, because its threads may run.
struct Library {
    api: &'static OrtApi,
    env: NonNull<OrtEnv>,
    memory: NonNull<OrtMemoryInfo>,
}

// SAFETY: the table is constant, and the library lets any thread use an environment and a
// description of memory.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: both came from this library and are given back once; sessions hold the library.
        unsafe {
            (self.api.ReleaseMemoryInfo)(self.memory.as_ptr());
            (self.api.ReleaseEnv)(self.env.as_ptr());
        }
    }
}

fn no_library(reason: String) -> RuntimeError {
    RuntimeError::Library { runtime: NAME, reason }
}

impl Onnxruntime {
    /// Opens a library: this file, or that of `ORT_DYLIB_PATH`, or the system's.
    ///
    /// # Errors
    ///
    /// [`RuntimeError::Library`]: there is none, or it is too old.
    pub fn open(file: Option<&Path>) -> Result<Self, RuntimeError> {
        let named =
            file.map(Path::to_owned).or_else(|| std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from));
        let file = named.unwrap_or_else(|| PathBuf::from(LIBRARY));
        let path =
            CString::new(file.as_os_str().as_bytes()).map_err(|error| no_library(error.to_string()))?;
        // SAFETY: a name that ends with zero. The file is one that the user named: its constructors
        // run.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: the text of this thread's last failure, until the next call.
            let text = unsafe { libc::dlerror() };
            let reason = if text.is_null() {
                file.display().to_string()
            } else {
                // SAFETY: a text that ends with zero.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            };
            return Err(no_library(reason));
        }
        // SAFETY: an open library, and a name that ends with zero.
        let symbol = unsafe { libc::dlsym(handle, c"OrtGetApiBase".as_ptr()) };
        let shown = file.display();
        if symbol.is_null() {
            return Err(no_library(format!("{shown} is no library of onnxruntime")));
        }
        // SAFETY: this is the type of that function in every version.
        let base = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "system" fn() -> *const OrtApiBase>(symbol)
        };
        // SAFETY: it has no requirements; what it returns lives as long as the library.
        let api = unsafe { base().as_ref().and_then(|base| (base.GetApi)(API_VERSION).as_ref()) };
        let api = api.ok_or_else(|| no_library(format!("{shown} is older than version 1.{API_VERSION}")))?;
        let (mut env, mut memory) = (ptr::null_mut(), ptr::null_mut());
        // What goes wrong is returned as well; it need not be on standard error too.
        let level = OrtLoggingLevel::ORT_LOGGING_LEVEL_FATAL;
        // SAFETY: places for the results, and a name that ends with zero.
        check(api, unsafe { (api.CreateEnv)(level, c"pleach".as_ptr(), &raw mut env) })
            .map_err(no_library)?;
        // SAFETY: a place for the result.
        check(api, unsafe {
            (api.CreateCpuMemoryInfo)(
                OrtAllocatorType::OrtDeviceAllocator,
                OrtMemType::OrtMemTypeDefault,
                &raw mut memory,
            )
        })
        .map_err(no_library)?;
        let (Some(env), Some(memory)) = (NonNull::new(env), NonNull::new(memory)) else {
            return Err(no_library("it gives nothing".to_owned()));
        };
        Ok(Self { library: Arc::new(Library { api, env, memory }) })
    }
}

/// The error of a status, which is given back.
fn check(api: &OrtApi, status: OrtStatusPtr) -> Result<(), String> {
    let status: *mut OrtStatus = status.0;
    if status.is_null() {
        return Ok(());
    }
    // SAFETY: a status of this library, whose text ends with zero.
    let text = unsafe { CStr::from_ptr((api.GetErrorMessage)(status)) }.to_string_lossy().into_owned();
    // SAFETY: it is given back once.
    unsafe { (api.ReleaseStatus)(status) };
    Err(text)
}

impl Runtime for Onnxruntime {
    fn name(&self) -> &'static str {
        NAME
    }

    fn element(&self, element: ElementType) -> Option<ElementType> {
        data_type(element).map(|_| element)
    }

    fn needs_rewrites(&self) -> bool {
        false
    }

    fn writes_places(&self) -> bool {
        true
    }

    fn load(
        &self,
        model: Vec<u8>,
        inputs: &[&str],
        outputs: &[&str],
    ) -> Result<Box<dyn Program>, RuntimeError> {
        let names =
            |names: &[&str]| names.iter().map(|&name| CString::new(name)).collect::<Result<Vec<_>, _>>();
        let failed = |reason: String| load_error(&reason);
        let (inputs, outputs) = (names(inputs), names(outputs));
        let inputs = inputs.map_err(|error| failed(error.to_string()))?;
        let outputs = outputs.map_err(|error| failed(error.to_string()))?;
        let session = Session::new(&self.library, &model).map_err(failed)?;
        Ok(Box::new(OnnxruntimeProgram { session, inputs, outputs }))
    }

    fn within(&self, work: &mut (dyn FnMut() + Send)) {
        work();
    }
}

fn load_error(text: &str) -> RuntimeError {
    // "... Could not find an implementation for Name(1) node with name '...'", with the operator's
    // version, and
    // "... No Op registered for Name with domain_version of 17".
    let after = |words: &str| text.split(words).nth(1).and_then(|rest| rest.split(' ').next());
    match after("implementation for ").or_else(|| after("No Op registered for ")) {
        Some(operator) => RuntimeError::Operator {
            runtime: NAME,
            operator: operator.to_owned(),
            remedy: "run with --runtime rten or a newer library, or export the model with a later opset",
        },
        None => RuntimeError::Load { runtime: NAME, reason: text.to_owned() },
    }
}

struct Session {
    library: Arc<Library>,
    session: NonNull<OrtSession>,
}

// SAFETY: any thread may use a session.
unsafe impl Send for Session {}

impl Session {
    fn new(library: &Arc<Library>, model: &[u8]) -> Result<Self, String> {
        let api = library.api;
        let mut options: *mut OrtSessionOptions = ptr::null_mut();
        // SAFETY: a place for the result.
        check(api, unsafe { (api.CreateSessionOptions)(&raw mut options) })?;
        let mut session = ptr::null_mut();
        // SAFETY: options that were just made, released below; the model is copied by the call.
        let made = unsafe {
            // One thread: each rank has one processor.
            check(api, (api.SetIntraOpNumThreads)(options, 1))
                .and_then(|()| check(api, (api.SetInterOpNumThreads)(options, 1)))
                .and_then(|()| {
                    let level = GraphOptimizationLevel::ORT_ENABLE_ALL;
                    check(api, (api.SetSessionGraphOptimizationLevel)(options, level))
                })
                .and_then(|()| {
                    let (env, bytes) = (library.env.as_ptr(), model.as_ptr().cast());
                    check(
                        api,
                        (api.CreateSessionFromArray)(env, bytes, model.len(), options, &raw mut session),
                    )
                })
        };
        // SAFETY: given back once.
        unsafe { (api.ReleaseSessionOptions)(options) };
        made?;
        let session = NonNull::new(session).ok_or("it gives no session")?;
        Ok(Self { library: Arc::clone(library), session })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: given back once, while the library is open.
        unsafe { (self.library.api.ReleaseSession)(self.session.as_ptr()) };
    }
}

/// A tensor of the library.
struct TensorHandle {
    library: Arc<Library>,
    value: NonNull<OrtValue>,
}

impl TensorHandle {
    /// A tensor over this memory.
    ///
    /// # Safety
    ///
    /// The memory stays while the tensor is used, and may be written if the tensor is an output.
    unsafe fn over(
        library: &Arc<Library>,
        form: &TensorForm,
        bytes: *mut u8,
        len: usize,
    ) -> Result<Self, String> {
        let api = library.api;
        let kind = data_type(form.element).ok_or_else(|| format!("it has no tensors of {}", form.element))?;
        let dims: Vec<i64> = form.dims.iter().map(|&dim| dim as i64).collect();
        let mut value = ptr::null_mut();
        // SAFETY: the caller's promise; the dimensions are copied, and their product is checked
        // against the length by the library.
        check(api, unsafe {
            (api.CreateTensorWithDataAsOrtValue)(
                library.memory.as_ptr(),
                bytes.cast(),
                len,
                dims.as_ptr(),
                dims.len(),
                kind,
                &raw mut value,
            )
        })?;
        let value = NonNull::new(value).ok_or("it gives no tensor")?;
        Ok(Self { library: Arc::clone(library), value })
    }

    fn form(&self) -> Result<TensorForm, String> {
        let api = self.library.api;
        let mut info: *mut OrtTensorTypeAndShapeInfo = ptr::null_mut();
        // SAFETY: a value of this library, and a place for the result.
        check(api, unsafe { (api.GetTensorTypeAndShape)(self.value.as_ptr(), &raw mut info) })?;
        let mut kind = 0_i32;
        let mut count = 0;
        let mut dims = Vec::new();
        // SAFETY: the description that was just made, places for the results, and as many
        // dimensions as it says.
        let read = unsafe {
            check(api, (api.GetTensorElementType)(info, (&raw mut kind).cast()))
                .and_then(|()| check(api, (api.GetDimensionsCount)(info, &raw mut count)))
                .and_then(|()| {
                    dims = vec![0_i64; count];
                    check(api, (api.GetDimensions)(info, dims.as_mut_ptr(), count))
                })
        };
        // SAFETY: given back once.
        unsafe { (api.ReleaseTensorTypeAndShapeInfo)(info) };
        read?;
        let element = ElementType::from_onnx(kind).ok_or("its tensor has an unknown type")?;
        Ok(TensorForm { element, dims: dims.into_iter().map(|dim| dim.unsigned_abs()).collect() })
    }
}

impl Drop for TensorHandle {
    fn drop(&mut self) {
        // SAFETY: given back once, while the library is open.
        unsafe { (self.library.api.ReleaseValue)(self.value.as_ptr()) };
    }
}

/// Results in memory of the library.
struct OwnValues {
    _tensor: TensorHandle,
    bytes: NonNull<u8>,
    len: usize,
}

impl Values for OwnValues {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the bytes of the tensor, which is held and which nobody writes any more.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr(), self.len) }
    }
}

struct OnnxruntimeProgram {
    session: Session,
    inputs: Vec<CString>,
    outputs: Vec<CString>,
}

/// Inputs and outputs of one run.
struct Binding {
    library: Arc<Library>,
    binding: NonNull<OrtIoBinding>,
}

impl Drop for Binding {
    fn drop(&mut self) {
        // SAFETY: given back once, while the library is open.
        unsafe { (self.library.api.ReleaseIoBinding)(self.binding.as_ptr()) };
    }
}

impl OnnxruntimeProgram {
    fn try_run(
        &self,
        inputs: &[TensorRef<'_>],
        places: &mut [Option<Place<'_>>],
    ) -> Result<Vec<Output>, String> {
        let library = &self.session.library;
        let api = library.api;
        let mut binding = ptr::null_mut();
        // SAFETY: an open session, and a place for the result.
        check(api, unsafe { (api.CreateIoBinding)(self.session.session.as_ptr(), &raw mut binding) })?;
        let binding = NonNull::new(binding).ok_or("it gives no binding")?;
        let binding = Binding { library: Arc::clone(library), binding };
        let mut bound = Vec::new();
        for (name, input) in self.inputs.iter().zip(inputs) {
            let (bytes, len) = (input.bytes.as_ptr().cast_mut(), input.bytes.len());
            // SAFETY: the bytes are borrowed until the run has ended, and inputs are not written.
            let tensor = unsafe { TensorHandle::over(library, input.form, bytes, len)? };
            // SAFETY: a binding, a name that ends with zero, and a tensor that is held below.
            check(api, unsafe {
                (api.BindInput)(binding.binding.as_ptr(), name.as_ptr(), tensor.value.as_ptr())
            })?;
            bound.push(tensor);
        }
        for (number, name) in self.outputs.iter().enumerate() {
            let place = places.get_mut(number).and_then(Option::as_mut);
            let bind = binding.binding.as_ptr();
            if let Some(place) = place {
                let (bytes, len) = (place.bytes.as_mut_ptr(), place.bytes.len());
                // SAFETY: the bytes are borrowed to be written until the run has ended.
                let tensor = unsafe { TensorHandle::over(library, place.form, bytes, len)? };
                // SAFETY: as above.
                check(api, unsafe { (api.BindOutput)(bind, name.as_ptr(), tensor.value.as_ptr()) })?;
                bound.push(tensor);
            } else {
                // SAFETY: as above; the library keeps what it needs of the description of memory.
                check(api, unsafe {
                    (api.BindOutputToDevice)(bind, name.as_ptr(), library.memory.as_ptr())
                })?;
            }
        }
        // SAFETY: a session, no options, and a binding whose tensors are held.
        check(api, unsafe {
            (api.RunWithBinding)(self.session.session.as_ptr(), ptr::null(), binding.binding.as_ptr())
        })?;
        let outputs = self.results(&binding)?;
        drop(bound);
        let mut results = Vec::with_capacity(outputs.len());
        for (number, tensor) in outputs.into_iter().enumerate() {
            let form = tensor.form()?;
            let is_placed = places.get(number).is_some_and(Option::is_some);
            let bytes = if is_placed { None } else { Some(own_values(tensor, &form)?) };
            results.push(Output { form, bytes });
        }
        Ok(results)
    }

    /// The tensors that a run has given, in the order of the outputs.
    fn results(&self, binding: &Binding) -> Result<Vec<TensorHandle>, String> {
        let library = &self.session.library;
        let api = library.api;
        let mut allocator: *mut OrtAllocator = ptr::null_mut();
        // SAFETY: a place for the result, which is the library's own.
        check(api, unsafe { (api.GetAllocatorWithDefaultOptions)(&raw mut allocator) })?;
        let (mut values, mut count) = (ptr::null_mut(), 0);
        // SAFETY: places for the results.
        check(api, unsafe {
            (api.GetBoundOutputValues)(binding.binding.as_ptr(), allocator, &raw mut values, &raw mut count)
        })?;
        let mut tensors = Vec::with_capacity(count);
        for number in 0..count {
            // SAFETY: the list has so many values, each of which is given back once.
            if let Some(value) = NonNull::new(unsafe { *values.add(number) }) {
                tensors.push(TensorHandle { library: Arc::clone(library), value });
            }
        }
        // SAFETY: the list came from this allocator.
        check(api, unsafe { (api.AllocatorFree)(allocator, values.cast()) })?;
        if tensors.len() == self.outputs.len() {
            Ok(tensors)
        } else {
            Err("it gives too few results".to_owned())
        }
    }
}

fn own_values(tensor: TensorHandle, form: &TensorForm) -> Result<Box<dyn Values>, String> {
    let len = form.bytes().ok_or("its tensor is too long")? as usize;
    let mut bytes = ptr::null_mut();
    // SAFETY: a tensor, and a place for the result.
    check(tensor.library.api, unsafe {
        (tensor.library.api.GetTensorMutableData)(tensor.value.as_ptr(), &raw mut bytes)
    })?;
    let bytes = NonNull::new(bytes.cast::<u8>());
    let bytes = if len == 0 { NonNull::dangling() } else { bytes.ok_or("its tensor has no bytes")? };
    Ok(Box::new(OwnValues { _tensor: tensor, bytes, len }))
}

impl Program for OnnxruntimeProgram {
    fn run(
        &mut self,
        inputs: &[TensorRef<'_>],
        places: &mut [Option<Place<'_>>],
    ) -> Result<Vec<Output>, RuntimeError> {
        self.try_run(inputs, places).map_err(|reason| RuntimeError::Run { runtime: NAME, reason })
    }
}

fn data_type(element: ElementType) -> Option<ONNXTensorElementDataType> {
    use ONNXTensorElementDataType as Kind;
    Some(match element {
        ElementType::F32 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        ElementType::U8 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        ElementType::I8 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
        ElementType::U16 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
        ElementType::I16 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,
        ElementType::I32 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
        ElementType::I64 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
        ElementType::Bool => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
        ElementType::F16 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        ElementType::F64 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
        ElementType::U32 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,
        ElementType::U64 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
        ElementType::Bf16 => Kind::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
        _ => return None,
    })
}
