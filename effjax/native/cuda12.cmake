# CUDA 12 from PyPI, beside nvcc of CUDA 13.
#
# PyPI has CUDA 12's assembler (ptxas), headers and runtime, but not its nvcc. nvcc and the compiler
# to PTX are those of CUDA 13. The machine code is CUDA 12's: drivers of CUDA 12 cannot load what
# ptxas of CUDA 13 writes. The generated PTX uses nothing newer than PTX 8.8, which CUDA 12.9 reads;
# ptxas fails otherwise.

# Sets CUDA12_LAUNCHER to a command that takes nvcc's command line and compiles for CUDA 12, and
# CUDA12_RUNTIME to the static runtime. WHEELS is the folder nvidia/cu13 of Python's packages.
function(find_cuda12 WHEELS)
  execute_process(
    COMMAND
      "${Python_EXECUTABLE}" -c
      "import nvidia.cuda_cccl as c, nvidia.cuda_nvcc as n, nvidia.cuda_runtime as r; print(*(list(m.__path__)[0] for m in (c, n, r)), sep=';')"
    OUTPUT_VARIABLE packages OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed OR NOT WHEELS)
    message(
      FATAL_ERROR
        "EFFJAX_CUDA12 needs nvcc of CUDA 13 from PyPI, and nvidia-cuda-nvcc-cu12, "
        "nvidia-cuda-runtime-cu12 and nvidia-cuda-cccl-cu12")
  endif()
  list(GET packages 0 cccl)
  list(GET packages 1 assembler)
  list(GET packages 2 runtime)

  set(toolkit "${CMAKE_CURRENT_BINARY_DIR}/cuda12")
  file(REMOVE_RECURSE "${toolkit}")
  # nvcc reads nvcc.profile beside itself, so a link does not do.
  file(COPY "${WHEELS}/bin/nvcc" DESTINATION "${toolkit}/bin")
  foreach(tool cudafe++ fatbinary)
    file(CREATE_LINK "${WHEELS}/bin/${tool}" "${toolkit}/bin/${tool}" SYMBOLIC)
  endforeach()
  file(CREATE_LINK "${assembler}/bin/ptxas" "${toolkit}/bin/ptxas" SYMBOLIC)
  # The headers in crt/ belong to nvcc, all others to the runtime.
  file(MAKE_DIRECTORY "${toolkit}/include")
  foreach(header crt fatbinary_section.h)
    file(CREATE_LINK "${WHEELS}/include/${header}" "${toolkit}/include/${header}" SYMBOLIC)
  endforeach()
  file(
    WRITE "${toolkit}/bin/nvcc.profile"
    "CICC_PATH = $(_HERE_)\n"
    "NVVMIR_LIBRARY_DIR = ${WHEELS}/nvvm/libdevice\n"
    "PATH += $(_HERE_):\n"
    "INCLUDES += \"-I${toolkit}/include\" \"-I${runtime}/include\" $(_SPACE_)\n"
    "SYSTEM_INCLUDES += \"-isystem\" \"${cccl}/include\" $(_SPACE_)\n")
  file(
    WRITE "${toolkit}/bin/cicc"
    "#!/bin/sh\nset -e\n'${WHEELS}/nvvm/bin/cicc' \"$@\"\n"
    "for output; do :; done # the last argument\n"
    "case $output in *.ptx) sed -i 's/^[.]version .*/.version 8.8/' \"$output\" ;; *) exit 1 ;; esac\n")
  file(WRITE "${toolkit}/launch" "#!/bin/sh\nshift\nexec '${toolkit}/bin/nvcc' \"$@\"\n")
  file(
    CHMOD "${toolkit}/bin/cicc" "${toolkit}/launch"
    PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
  set(CUDA12_LAUNCHER "${toolkit}/launch" PARENT_SCOPE)
  set(CUDA12_RUNTIME "${runtime}/lib/libcudart_static.a" PARENT_SCOPE)
endfunction()
